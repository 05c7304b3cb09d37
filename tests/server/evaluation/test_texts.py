"""Files become texts with labels; what can't be compared is told in one sentence."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from common.errors import DataError
from server.evaluation.texts import Columns, Texts, check_apart, check_labels, key, read_texts, unknown_labels, without

COLUMNS = Columns("text", {"topic": "label"})


def _file(folder: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    path = folder / "rows.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def test_rows_become_texts_as_they_look(tmp_path: Path) -> None:
    path = _file(
        tmp_path,
        [
            {"text": " one\n two\u200b", "label": 4},
            {"text": "", "label": "a"},
            {"text": "three", "label": None},
            {"text": "four", "label": ["a", "b"]},
            {"text": "five", "label": "a", "other": 1},
        ],
    )
    found = read_texts(path, "--test", COLUMNS)
    assert found.texts == ("one two", "five")
    assert found.labels == {"topic": ("4", "a")}
    assert found.codes == (("4",), ("a",))
    assert found.left_out == 3


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"text": "one", "topic": "a"}], r"column 'label' is missing; the file has 'text', 'topic'; --label-column"),
        ([{"words": "one", "label": "a"}], r"column 'text' is missing.*--text-column"),
        ([{"text": " ", "label": "a"}, {"text": "x", "label": ""}], r"none of 2 rows has a text in column 'text'"),
    ],
)
def test_a_file_that_is_no_use_is_told(rows: Sequence[Mapping[str, object]], said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=said):
        read_texts(_file(tmp_path, rows), "--test", COLUMNS)


def test_one_column_may_be_text_and_label(tmp_path: Path) -> None:
    found = read_texts(_file(tmp_path, [{"text": "one"}]), "--test", Columns("text", {"topic": "text"}))
    assert (found.texts, found.labels["topic"]) == (("one",), ("one",))


def test_texts_on_both_sides_are_told_without_quoting_them() -> None:
    training, holdout = Texts("--train", ("Thank you", "b")), Texts("--holdout", ("new", "thank  YOU", "also new"))
    with pytest.raises(
        DataError, match=r"1 of the 3 texts of --holdout are also in --train.*text 2 .*--drop-overlap"
    ) as told:
        check_apart(training, holdout)
    assert "thank" not in str(told.value).lower()
    check_apart(training, without(holdout, training))
    assert without(holdout, training).texts == ("new", "also new")


def test_one_label_only_is_told() -> None:
    with pytest.raises(DataError, match="--test: every text has topic 'a'"):
        check_labels(Texts("--test", ("x", "y"), {"topic": ("a", "a")}))


def test_labels_that_the_corpus_has_not_are_found() -> None:
    corpus = Texts("corpus", ("x", "y"), {"topic": ("a", "b")})
    assert unknown_labels(corpus, Texts("--test", ("x", "y"), {"topic": ("a", "c")}), "topic") == ["c"]
    with pytest.raises(DataError, match=r"it has 'A', 'B', the corpus 'a', 'b'"):
        unknown_labels(corpus, Texts("--test", ("x", "y"), {"topic": ("A", "B")}), "topic")


def test_a_draw_is_the_same_for_the_same_seed() -> None:
    texts = Texts("t", tuple(map(str, range(50))), {"n": tuple(map(str, range(50)))})
    drawn = texts.drawn(10, 3)
    assert drawn.texts == texts.drawn(10, 3).texts == drawn.labels["n"]
    assert len(set(drawn.texts)) == 10
    assert drawn.texts != texts.drawn(10, 4).texts
    assert len(texts.drawn(99, 0)) == 50


def test_a_key_does_not_see_case_and_blanks() -> None:
    assert key("One  two\n") == key("one TWO")
    assert key("one two") != key("one  three")


def test_what_they_hold_is_not_in_their_name() -> None:
    assert "secret" not in repr(Texts("file", ("secret",), {"topic": ("a",)}))
