"""The study: one meaning, one hash; what can't work is refused in one sentence before any data is touched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.errors import ExitCode, StudyError
from common.study import Study

MINIMAL = """
name = "demo"
[codes]
attributes = [{name = "topic", values = ["Staff", "Food"]}, {name = "stars", values = [1, 2, 3]}]
[privacy]
epsilon = 4
delta = 1e-5
[generator]
base = "tiny"
"""


def minimal() -> dict[str, Any]:
    return {
        "name": "demo",
        "codes": {
            "attributes": [
                {"name": "topic", "values": ["Staff", "Food"]},
                {"name": "stars", "values": [1, 2, 3]},
            ]
        },
        "privacy": {"epsilon": 4, "delta": 1e-5},
        "generator": {"base": "tiny"},
    }


def load(folder: Path, text: str) -> Study:
    path = folder / "study.toml"
    path.write_text(text, encoding="utf-8")
    return Study.load(path)


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(StudyError) as caught:
        load(folder, text)
    assert caught.value.exit_code == ExitCode.USAGE
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert sentence.startswith(f"{folder / 'study.toml'}: ")
    return sentence.removeprefix(f"{folder / 'study.toml'}: ")


def test_smallest_study_has_every_default_written_out(tmp_path: Path) -> None:
    study = load(tmp_path, MINIMAL)
    assert study == Study.model_validate(minimal())
    canonical = json.loads(study.canonical)
    assert set(canonical) == set(Study.model_fields)
    assert canonical["training"]["rounds"] == study.training.rounds


@pytest.mark.parametrize(
    ("old", "new", "where", "part"),
    [
        ('name = "demo"', 'name = "demo"\nnmae = 1', "nmae", "unknown key"),
        ("epsilon = 4", "epsilon = 4\nepsilom = 5", "privacy.epsilom", "unknown key"),
        ('name = "demo"', "", "name", "missing"),
        ("delta = 1e-5", "", "privacy", "delta is missing; give epsilon and delta, or one of them with"),
        ("epsilon = 4", "training_noise_multiplier = 1", "privacy", "epsilon is missing; give epsilon and delta"),
        ("epsilon = 4\ndelta = 1e-5", "vote_noise_multiplier = 1", "privacy", "epsilon is missing, and delta too"),
        ("epsilon = 4", "accounting = 'gdp'\nepsilon = 4", "privacy.accounting", "'joint' or 'paper'"),
        (
            "epsilon = 4",
            "accounting = 'paper'\ntraining_noise_multiplier = 1\nvote_noise_multiplier = 1",
            "privacy",
            "'paper' splits an epsilon and a delta; give both",
        ),
        (
            "[privacy]",
            "[voting]\nvotes_per_unit = 3\n[privacy]",
            "voting.votes_per_unit is 3",
            "a record casts exactly",
        ),
        ('name = "demo"', 'name = "../demo"', "name", "'../demo' isn't accepted"),
        ("epsilon = 4", "epsilon = 0", "privacy.epsilon", "0 isn't accepted: input should be greater than 0"),
        ("epsilon = 4", "epsilon = -1.5", "privacy.epsilon", "-1.5 isn't accepted"),
        ("epsilon = 4", "epsilon = inf", "privacy.epsilon", "inf isn't accepted"),
        ("epsilon = 4", "epsilon = nan", "privacy.epsilon", "nan isn't accepted"),
        ("delta = 1e-5", "delta = 1.0", "privacy.delta", "1.0 isn't accepted: input should be less than 1"),
        ("delta = 1e-5", "delta = 0", "privacy.delta", "0 isn't accepted: input should be greater than 0"),
        ("delta = 1e-5", 'delta = 1e-5\nunit = "person"', "privacy.unit", "'record' or 'patient'"),
        ("delta = 1e-5", "delta = 1e-5\ncodes_per_unit = 2", "privacy.codes_per_unit is 2", "a record has exactly one"),
        ('"Food"]}', '"Food"], multiple = true}', "privacy.codes_per_unit is 1", "at least 2"),
        ('"Staff", "Food"', "", "codes.attributes.0.values", "has no values"),
        ("[privacy]", "[pool]\nsize = 5\n[privacy]", "pool.size is 5", "fewer than the 6 codes"),
        ("[privacy]", "[pool]\nsize = 'many'\n[privacy]", "pool.size", "'many' isn't accepted"),
        (
            "[privacy]",
            "[training]\nbatch_size = 101\n[privacy]",
            "training.batch_size is 101",
            "min_documents (100)",
        ),
        (
            "[privacy]",
            "[pool]\nmax_new_tokens = 200\n[privacy]",
            "pool.max_new_tokens is 200",
            "max_tokens (128)",
        ),
        (
            "[privacy]",
            "[federation]\nexpected_sites = 1\n[privacy]",
            "federation.expected_sites is 1",
            "(1 + 1)",
        ),
        (
            "[privacy]",
            "[voting]\nneighbours = 0\n[privacy]",
            "voting.neighbours is 0",
            "at least 1 is accepted",
        ),
        ("[privacy]", "[voting]\nneighbours = 'all'\n[privacy]", "voting.neighbours: 'all' isn't", "'auto'"),
        ("[privacy]", "[corpus]\nselection = 'best'\n[privacy]", "corpus.selection", "'density', 'simplex'"),
        ("[privacy]", "[privacy", "not valid TOML", ""),
    ],
)
def test_mistake_in_a_study_is_one_sentence_with_field_value_and_what_is_accepted(
    tmp_path: Path, old: str, new: str, where: str, part: str
) -> None:
    assert old in MINIMAL
    sentence = refusal(tmp_path, MINIMAL.replace(old, new, 1))
    assert sentence.startswith(where)
    assert part in sentence


def test_missing_study_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"none\.toml: no such file"):
        Study.load(tmp_path / "none.toml")


def test_study_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_bytes(b"name = '\xff'")
    with pytest.raises(StudyError, match="not valid TOML"):
        Study.load(tmp_path / "study.toml")


def shuffled(value: Any, random: Any) -> Any:
    """The same mapping with its keys in another order, at every depth."""
    if isinstance(value, list):
        return [shuffled(item, random) for item in value]
    if not isinstance(value, dict):
        return value
    keys = list(value)
    random.shuffle(keys)
    return {key: shuffled(value[key], random) for key in keys}


@given(st.randoms(use_true_random=False))
def test_hash_does_not_depend_on_the_order_of_keys(random: Any) -> None:
    study = Study.model_validate(minimal())
    written = json.loads(study.canonical)
    assert Study.model_validate(shuffled(written, random)).sha256 == study.sha256


@given(
    st.floats(1e-3, 1e3),
    st.floats(1e-12, 0.5),
    st.text(max_size=20),
    st.integers(6, 10**6),
    st.sampled_from(["auto", 3]),
)
def test_hash_survives_the_wire(epsilon: float, delta: float, preamble: str, size: int, neighbours: Any) -> None:
    plan = minimal() | {
        "privacy": {"epsilon": epsilon, "delta": delta},
        "pool": {"size": size},
        "voting": {"neighbours": neighbours},
    }
    plan["codes"]["preamble"] = preamble
    study = Study.model_validate(plan)
    again = Study.from_canonical(study.canonical)
    assert (again, again.canonical, again.sha256) == (study, study.canonical, study.sha256)


def test_hash_is_the_same_for_a_default_left_out_and_written_out() -> None:
    study = Study.model_validate(minimal())
    explicit = minimal() | {"training": {"rounds": study.training.rounds}, "pool": study.pool.model_dump()}
    assert Study.model_validate(explicit).sha256 == study.sha256
    assert Study.model_validate(minimal() | {"privacy": {"epsilon": 4.0, "delta": 0.00001}}).sha256 == study.sha256


def test_a_changed_copy_has_a_hash_of_its_own() -> None:
    study = Study.model_validate(minimal())
    before = study.sha256, study.neighbours
    changed = study.model_copy(update={"pool": study.pool.model_copy(update={"size": 6})})
    assert (changed.sha256, changed.neighbours) != before
    assert changed.sha256 == Study.from_canonical(changed.canonical).sha256


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return [path]
    return [leaf for key, item in items for leaf in leaves(item, (*path, key))]


ALTERNATIVES: dict[str, Any] = {
    "unit": "patient",
    "target_modules": ["q"],
    "dtype": "bfloat16",
    "over_long": "drop",
    "sha256": "ab" * 32,
    "embedder_sha256": "ab" * 32,
    "similarity": "l2",
    "smoothing": "kernel",
    "lora": "plain",
    "learning_rate": 0.5,
    "aggregation": "trimmed-mean",
    "weights": "noisy-profile",
    "neighbours": 2,
    "selection": "paper",
    "accounting": "paper",
    "training_noise_multiplier": 2.0,
    "vote_noise_multiplier": 2.0,
    "votes_per_unit": 12,
}


@pytest.mark.parametrize("path", leaves(json.loads(Study.model_validate(minimal()).canonical)), ids=str)
def test_every_field_is_part_of_the_hash(path: tuple[str | int, ...]) -> None:
    study = Study.model_validate(minimal() | {"federation": {"expected_sites": 9}})
    changed = json.loads(study.canonical)
    if path[-1] in ("codes_per_unit", "votes_per_unit", "multiple"):
        changed["privacy"] |= {"unit": "patient", "codes_per_unit": 2}
        study = Study.model_validate(changed)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = _another(path[-1], inner[path[-1]])
    assert Study.model_validate(changed).sha256 != study.sha256


def _another(key: str | int, value: Any) -> Any:
    if key == "optimizer":
        return "fedavgm" if value == "fedavg" else "sgd"
    if key in ALTERNATIVES:
        return ALTERNATIVES[str(key)]
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return value / 2
    return value + 1 if isinstance(value, int) else f"{value}x"


@pytest.mark.parametrize(("size", "k"), [(6, 1), (119, 1), (120, 2), (480, 8), (10**6, 8)])
def test_neighbours_follow_the_candidates_per_code(size: int, k: int) -> None:
    assert Study.model_validate(minimal() | {"pool": {"size": size}}).neighbours == k


def test_records_of_several_codes_may_cast_more_votes() -> None:
    several = minimal() | {"voting": {"neighbours": 4, "votes_per_unit": 8}}
    several["codes"]["attributes"][0]["multiple"] = True
    several["privacy"]["codes_per_unit"] = 2
    study = Study.model_validate(several)
    assert (study.privacy.unit, study.privacy.codes_per_unit, study.votes_per_unit) == ("record", 2, 8)


def test_neighbours_that_are_named_are_taken() -> None:
    assert Study.model_validate(minimal() | {"voting": {"neighbours": 20}}).neighbours == 20


@example("\ud800")
@example('{"name": "\\ud800"}')
@example("[" * 100_000)
@example("9" * 5000)
@given(st.one_of(st.text(max_size=40), st.recursive(st.none() | st.integers(), st.lists).map(json.dumps)))
def test_anything_else_on_the_wire_is_a_study_error(text: str) -> None:
    with pytest.raises(StudyError):
        Study.from_canonical(text)
