"""What the site's columns say is found in texts however it is written; what is too short isn't looked for."""

from __future__ import annotations

import pytest

from common.site.audit.known_values import KnownValues, Value, values_of, values_of_row


def _found(cell: str, text: str) -> list[str]:
    return [written for _, written in KnownValues(values_of("name", cell)).found(text)]


@pytest.mark.parametrize(
    ("cell", "text", "written"),
    [
        ("John Smith", "then JOHN  smith came", "JOHN  smith"),
        ("Smith, John", "then John Smith came", "John Smith"),
        ("Smith, John", "Smith, John: seen", "Smith, John"),
        ("O'Neill", "Ms O'Neill's knee", "O'Neill"),
        ("Smith", "old Smith came", "Smith"),
        ("12 High Street, Leeds", "of 12 High Street, Leeds", "12 High Street, Leeds"),
        ("RX1234", "see rx1234.", "rx1234"),
        ("943 476 5919", "no. 9434765919", "9434765919"),
        ("9434765919", "no. 943-476 5919", "943-476 5919"),
        ("Szabó", "Frau SZABÓ", "SZABÓ"),
    ],
)
def test_a_value_is_found_as_texts_write_it(cell: str, text: str, written: str) -> None:
    assert _found(cell, text) == [written]


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        ("Smith", "a Smithson, a blacksmith, a smith"),
        ("May", "he may come"),
        ("John Smith", "John saw Smith"),
        ("123456", "1234567 and 12345 and 12 3456 789"[:24]),
        ("12345", "12 34, 5"[:5]),
    ],
)
def test_what_is_another_word_or_number_is_not(cell: str, text: str) -> None:
    assert _found(cell, text) == []


@pytest.mark.parametrize("cell", ["", "  ", "-", "Jo", "1234", "12-34", "F"])
def test_what_is_too_short_is_not_looked_for(cell: str) -> None:
    assert values_of("name", cell) == frozenset()


def test_given_name_and_surname_of_two_columns_are_a_name() -> None:
    values = values_of_row({"first": "Anne", "last": "Smith", "number": "123456"})
    pair = Value("first + last", ("anne", "smith"))
    assert pair in values
    found = {value for value, _ in KnownValues(values).found("Smith, Anne, and Anne Smith")}
    assert {value.words for value in found if value.column == "first + last"} == {("smith", "anne"), ("anne", "smith")}


def test_a_value_does_not_show_itself() -> None:
    assert "smith" not in repr(values_of("name", "Smith")).lower()
    assert "name" in repr(values_of("name", "Smith"))


def test_a_long_text_of_one_name_takes_linear_time() -> None:
    assert sum(1 for _ in KnownValues(values_of("name", "Smith")).found("Smith " * 100_000)) == 100_000
