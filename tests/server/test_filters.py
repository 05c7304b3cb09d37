"""Every rule drops what it is for, keeps what it isn't for, and says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.study import Study
from server.filters import DUPLICATE, ECHO, EMPTY, NEAR, OVER_LONG, REPETITIVE, Filters, repetition
from tests.hospitals import small_study

SENTENCE = "The nurses were kind and the ward was clean, but nobody told me when I could go home."


def _filters(**options: Any) -> Filters:
    study = Study.model_validate(small_study(Path("x"), pool=options))
    return Filters(study.codes, study.pool, 100)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", EMPTY),
        ("?! … --", EMPTY),
        ("A fine day. Text: again", ECHO),
        ("tone: 1 and so on", ECHO),
        ("TOPIC: STAFF", ECHO),
        ("a comment. And more", ECHO),
        ("very good very good very good very good very good", REPETITIVE),
        (SENTENCE, ""),
        ("Yes", ""),
        ("7", ""),
        ("好", ""),
    ],
)
def test_a_text_by_itself(text: str, reason: str) -> None:
    assert _filters().reason(text, 0, ended=True) == reason


def test_the_words_of_another_code_are_no_echo() -> None:
    assert _filters().reason("tone: 2 is what I would give", 0, ended=True) == ""


def test_a_text_that_was_cut_is_kept_unless_the_study_drops_it() -> None:
    assert _filters().reason(SENTENCE, 0, ended=False) == ""
    assert _filters(over_long="drop").reason(SENTENCE, 0, ended=False) == OVER_LONG
    assert _filters(over_long="drop").reason(SENTENCE, 0, ended=True) == ""


def test_duplicates_are_told_from_near_duplicates_and_only_near_ones_go_by_code() -> None:
    filters = _filters()
    assert filters.reason(SENTENCE, 0, ended=True) == ""
    assert filters.reason(SENTENCE.upper(), 0, ended=True) == DUPLICATE
    assert filters.reason(SENTENCE, 1, ended=True) == DUPLICATE
    assert filters.reason(SENTENCE.replace("home.", "home!!"), 0, ended=True) == NEAR
    assert filters.reason(SENTENCE.replace("home.", "home!!"), 1, ended=True) == ""
    assert filters.kept == 2


def test_what_was_dropped_is_not_remembered() -> None:
    filters = _filters(over_long="drop")
    assert filters.reason(SENTENCE, 0, ended=False) == OVER_LONG
    assert filters.reason(SENTENCE, 0, ended=True) == ""


def test_remembered_texts_are_duplicates_whatever_the_rules_say_of_them() -> None:
    filters = _filters(over_long="drop")
    for text in (SENTENCE, "Text: again", ""):
        filters.remember(text, 0)
    assert filters.kept == 3
    assert filters.reason(SENTENCE, 0, ended=True) == DUPLICATE
    assert filters.reason(SENTENCE.replace("home.", "home!!"), 0, ended=True) == NEAR


def test_thresholds_of_one_keep_all_but_exact_duplicates() -> None:
    filters = _filters(near_duplicate=1, max_repetition=1)
    assert filters.reason("ha " * 50, 0, ended=True) == ""
    assert filters.reason("ha " * 51, 0, ended=True) == ""
    assert filters.reason("ha " * 51, 0, ended=True) == DUPLICATE


@pytest.mark.parametrize(
    ("text", "share"), [("", 0), ("a b c", 0), ("a b c d", 0), ("a b c d e", 0), ("a a a a a", 0.5), ("a " * 13, 0.9)]
)
def test_repetition_is_the_share_of_4_grams_that_were_there_before(text: str, share: float) -> None:
    assert repetition(text) == pytest.approx(share)
