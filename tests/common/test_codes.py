"""Control codes: a public grid, numbered in one way only."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from common.codes import MAX_CODES, Attribute, ControlCodes
from common.configuration import first_problem

NAMES = st.text("abcde", min_size=1, max_size=3)
GRIDS = st.lists(
    st.tuples(
        NAMES,
        st.lists(st.text("uvwxyz ", min_size=1).map(str.strip).filter(bool), min_size=1, max_size=4, unique=True),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda attribute: attribute[0],
)


def codes(*attributes: tuple[str, Any], preamble: str = "") -> ControlCodes:
    listed = [{"name": name, "values": values} for name, values in attributes]
    return ControlCodes.model_validate({"attributes": listed, "preamble": preamble})


def test_several_values_are_all_their_combinations_in_the_order_given() -> None:
    made = codes(("topic", ["Staff", "Food", "Parking"]), ("stars", [1, 2]))
    assert made.indices([["Food", "Elsewhere", "Staff", "Food"], ["2"]], most=9) == [3, 1]
    assert made.indices([["Food", "Staff"], ["2", "1"]], most=3) == [3, 2, 1]
    assert made.indices([["Elsewhere"], ["2"]], most=9) == []


def test_a_billion_combinations_are_no_work() -> None:
    made = codes(*((name, list(range(10))) for name in "abcd"))
    everything = [[str(value) for value in range(10)] * 1000] * 4
    assert made.indices(everything, most=2) == [0, 1]


@given(GRIDS)
def test_every_code_has_one_index_and_finds_back(grid: list[tuple[str, list[str]]]) -> None:
    made = codes(*grid)
    assert [made.index(made.combinations[i]) for i in range(len(made))] == list(range(len(made)))
    assert len(set(made.combinations)) == len(made)
    assert all(tuple(made.as_mapping(i).values()) == made.combinations[i] for i in range(len(made)))


@given(GRIDS)
def test_codes_survive_a_round_trip(grid: list[tuple[str, list[str]]]) -> None:
    made = codes(*grid)
    assert ControlCodes.model_validate_json(made.model_dump_json()) == made


def test_last_attribute_moves_fastest() -> None:
    made = codes(("topic", ["Staff", "Food"]), ("stars", [1, 2, 3]))
    assert [made.label(i) for i in (0, 1, 3)] == [
        "topic=Staff, stars=1",
        "topic=Staff, stars=2",
        "topic=Food, stars=1",
    ]


def test_undeclared_combination_has_no_index() -> None:
    made = codes(("topic", ["Staff", "Food"]), ("stars", [1, 2]))
    assert made.index(("Staff", "2")) == 1
    for unknown in (("Staff", "3"), ("2", "Staff"), ("Staff",), ()):
        assert made.index(unknown) is None


def test_prompt_states_the_condition_and_nothing_else() -> None:
    made = codes(("topic", ["Staff", "Food"]), ("stars", [1, 2]), preamble="A comment.")
    assert made.prompt(2) == "A comment.\ntopic: Food\nstars: 1\nText:"
    assert codes(("topic", ["Staff"])).prompt(0) == "topic: Staff\nText:"


@pytest.mark.parametrize(
    ("attributes", "where", "part"),
    [
        ([("a", [])], "attributes.0.values", "has no values; at least one public value is needed"),
        ([("a", ["x"]), ("b", ["x", " "])], "attributes.1.values", "has an empty value"),
        ([("a", ["x", " y"])], "attributes.0.values", "lists ' y', with blanks around it"),
        ([("a", ["x", "y", "x"])], "attributes.0.values", "lists 'x' more than once"),
        ([("a", [4, "4"])], "attributes.0.values", "lists '4' more than once"),
        ([("a", [True])], "attributes.0.values.0", "True isn't accepted"),
        ([("a", [1.5])], "attributes.0.values.0", "1.5 isn't accepted"),
        ([("a", "xyz")], "attributes.0.values", "'xyz' isn't accepted"),
        ([("", ["x"])], "attributes.0.name", "'' isn't accepted"),
        ([], "", "no attributes are declared"),
        ([("a", ["x"]), ("a", ["y"])], "", "attribute names ['a', 'a'] are not distinct"),
        ([(f"a{i}", list(range(10))) for i in range(6)], "", f"more than {MAX_CODES} codes"),
    ],
)
def test_grid_that_makes_no_sense_is_refused_in_one_sentence(
    attributes: list[tuple[str, Any]], where: str, part: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        codes(*attributes)
    sentence = first_problem(caught.value)
    assert sentence.startswith(where)
    assert part in sentence
    assert "\n" not in sentence


def test_codes_cannot_be_changed_after_they_are_made() -> None:
    made = codes(("topic", ["Staff"]))
    with pytest.raises(ValidationError):
        made.attributes = (Attribute(name="other", values=("x",)),)
