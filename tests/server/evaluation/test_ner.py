"""Entities are counted as seqeval counts them, and a tagger finds what its text taught it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from common.errors import DataError
from server.evaluation.ner import Tagged, Tagger, macro_f1, read_tagged, relabelled, spans, tokens_of

DRUGS, ILLS = ["aspirin", "ibuprofen", "codeine", "insulin"], ["heart failure", "asthma", "renal failure", "gout"]


def _examples(seed: int, number: int = 80) -> Tagged:
    """Sentences with a drug and an illness."""
    chance = np.random.default_rng(seed)
    tokens, tags = [], []
    for _ in range(number):
        drug, ill = str(chance.choice(DRUGS)), str(chance.choice(ILLS)).split()
        before = chance.choice(["we gave", "they took", "she had"]).split()
        tokens.append((*before, drug, "for", *ill, "."))
        tags.append(("O", "O", "B-Drug", "O", "B-Ill", *["I-Ill"] * (len(ill) - 1), "O"))
    return Tagged(tuple(tokens), tuple(tags))


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("O B-a I-a O B-b", {("a", 1, 3), ("b", 4, 5)}),
        ("B-a B-a I-a", {("a", 0, 1), ("a", 1, 3)}),
        ("B-a I-a I-a", {("a", 0, 3)}),
        ("B-a B-b", {("a", 0, 1), ("b", 1, 2)}),
        ("O O", set()),
    ],
)
def test_entities_are_runs_of_one_type(tags: str, expected: set[tuple[str, int, int]]) -> None:
    assert spans(tags.split()) == expected


def test_f1_is_the_mean_over_types() -> None:
    true = [["B-a", "I-a", "O", "B-b"], ["B-b", "O", "O", "O"]]
    said = [["B-a", "O", "O", "B-b"], ["B-b", "O", "B-c", "O"]]
    # As seqeval 1.2.2 gives it in strict mode for the types that are there: a 0, b 1.
    assert macro_f1(true, said).value == 0.5
    assert macro_f1(true, true).value == 1
    assert macro_f1(true, [["O"] * 4] * 2).value == 0


def test_a_tagger_finds_what_its_text_taught_it() -> None:
    real, teacher = _examples(0), Tagger(_examples(1))
    synthetic = relabelled(teacher, [" ".join(own) for own in _examples(2).tokens] + ["", " "])
    assert len(synthetic) == 80
    found = macro_f1(real.tags, Tagger(synthetic)(real.tokens).tags)
    assert found.value > 0.95
    unrelated = relabelled(teacher, ["parking costs too much", "the soup was cold"] * 40)
    assert macro_f1(real.tags, Tagger(unrelated)(real.tokens).tags).value < 0.3


def test_what_a_tagger_says_is_iob2() -> None:
    said = Tagger(_examples(1))([("failure", "failure"), ("heart", "heart", "failure"), ()])
    assert list(map(len, said.tags)) == [2, 3, 0]
    for tags in said.tags:
        for before, tag in zip(("O", *tags), tags, strict=False):
            assert not tag.startswith("I-") or before[1:] == tag[1:]


def test_words_and_marks_are_tokens() -> None:
    assert tokens_of("Don't take 2.5mg!") == ("Don", "'", "t", "take", "2", ".", "5mg", "!")


def _file(folder: Path, *rows: object) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_file_of_lists_is_read(tmp_path: Path) -> None:
    good = {"tokens": ["Took", "aspirin"], "tags": ["O", "B-Drug"]}
    found = read_tagged(
        _file(tmp_path, good, {"tokens": ["one"], "tags": []}, {"tokens": "text", "tags": "O"}), "--ner"
    )
    assert found == Tagged((("Took", "aspirin"),), (("O", "B-Drug"),))


def test_a_part_of_a_file_is_read(tmp_path: Path) -> None:
    rows = [{"tokens": [word], "tags": ["B-Drug"], "split": side} for word, side in (("a", "train"), ("b", "test"))]
    assert read_tagged(_file(tmp_path, *rows), "--ner", ("split", ("test",))).tokens == (("b",),)
    with pytest.raises(DataError, match=r"no row whose 'split' is one of \['dev'\] with .* has an entity"):
        read_tagged(_file(tmp_path, *rows), "--ner", ("split", ("dev",)))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"tokens": ["a"]}, "column 'tags' is missing; .* labelled sentences need"),
        ({"tokens": ["a"], "tags": ["Drug"]}, "tag 'Drug' isn't IOB2"),
        ({"tokens": ["a"], "tags": ["O"]}, "--ner: no row .* has an entity"),
    ],
)
def test_a_file_that_is_no_use_is_told(row: dict[str, list[str]], said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=said):
        read_tagged(_file(tmp_path, row), "--ner")
