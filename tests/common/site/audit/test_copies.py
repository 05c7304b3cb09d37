"""A long run that few documents have is a suspect; boilerplate isn't, and doesn't hide a copy beside it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from common.site.audit.copies import runs_found, words_of
from common.site.audit.found import RunsFound
from common.site.audit.groups import Groups
from common.site.audit.limits import Limits
from common.site.audit.sources import OwnDocuments, Texts
from tests.common.site.audit.notes import notes

DOCUMENTS = notes(200, seed=1)
TEMPLATE = (
    "Thank you for referring this pleasant person, who was seen in our outpatient clinic together with the team on "
    "duty and has agreed to the plan below."
)


def _runs(
    texts: Sequence[str],
    documents: Sequence[str] = DOCUMENTS,
    units: Sequence[int] | None = None,
    holdout: Sequence[str] | None = None,
    limits: Limits = Limits(),
) -> RunsFound:
    own = OwnDocuments.of(documents, units or range(len(documents)))
    corpus = Texts(tuple(texts), tuple(range(1, len(texts) + 1)))
    return runs_found(corpus, own, Groups.of(own, holdout), limits, lambda stage, share: None)


def test_other_notes_of_the_same_kind_are_no_suspects() -> None:
    found = _runs(notes(200, seed=2))
    assert found.suspects == ()
    assert found.identical == 0
    assert found.bystander_suspects == 0
    assert found.bystanders is not None
    assert abs(found.characters.median - found.bystanders.median) < 5


def test_a_planted_copy_is_a_suspect_and_its_run_is_shown() -> None:
    texts = notes(200, seed=2)
    texts[7] = f"{texts[7][:60]} {DOCUMENTS[3][10:150]} {texts[7][60:]}"
    [suspect] = _runs(texts).suspects
    assert (suspect.row, suspect.units, suspect.whole) == (8, 1, False)
    assert DOCUMENTS[3][10:150].casefold() in suspect.run
    assert suspect.run not in repr(suspect)


def test_capitals_hide_no_copy() -> None:
    found = _runs([DOCUMENTS[3].upper()])
    assert found.identical == 1
    assert [(suspect.row, suspect.whole) for suspect in found.suspects] == [(1, True)]


@pytest.mark.parametrize(("characters", "suspects"), [(49, 0), (50, 1)])
def test_a_short_text_is_a_suspect_if_all_of_it_is_in_a_document(characters: int, suspects: int) -> None:
    text = "q" * characters
    assert len(_runs([text], [*DOCUMENTS, f"{DOCUMENTS[0]} {text}"]).suspects) == suspects


@pytest.mark.parametrize(("holders", "is_common"), [(4, False), (5, True)])
def test_what_many_units_have_is_boilerplate(holders: int, is_common: bool) -> None:
    documents = [f"{TEMPLATE} {note}" if i < holders else note for i, note in enumerate(DOCUMENTS)]
    found = _runs([f"{TEMPLATE} Nothing else."], documents)
    assert (len(found.suspects), found.common) == ((0, 1) if is_common else (1, 0))


def test_many_documents_of_one_unit_are_no_boilerplate() -> None:
    documents = [f"{TEMPLATE} {note}" if i < 50 else note for i, note in enumerate(DOCUMENTS)]
    units = [0 if i < 50 else i for i in range(len(documents))]
    assert [suspect.units for suspect in _runs([TEMPLATE], documents, units).suspects] == [1]


def test_what_held_out_documents_have_too_is_boilerplate() -> None:
    documents = [f"{TEMPLATE} {DOCUMENTS[0]}", *DOCUMENTS[1:]]
    holdout = notes(50, seed=3)
    with_template = [f"{TEMPLATE} {note}" for note in holdout]
    assert len(_runs([TEMPLATE], documents, holdout=holdout).suspects) == 1
    assert len(_runs([TEMPLATE], documents, holdout=with_template).suspects) == 0


def test_a_template_does_not_hide_the_copy_beside_it() -> None:
    documents = [f"{TEMPLATE} {note}" for note in DOCUMENTS]
    [suspect] = _runs([f"{TEMPLATE} It rained. {DOCUMENTS[9][:110]}"], documents).suspects
    assert suspect.units == 1
    assert DOCUMENTS[9][:100].casefold() in suspect.run


def test_of_held_out_documents_it_says_what_they_would_be_taken_for() -> None:
    holdout = notes(50, seed=3)
    assert _runs(notes(20, seed=2), holdout=holdout).bystander_suspects == 0
    near = [f"{DOCUMENTS[i][:120]} {note}" for i, note in enumerate(holdout)]
    assert _runs(notes(20, seed=2), holdout=near).bystander_suspects == 50


def test_like_for_like_a_copy_of_held_out_documents_shows_on_their_side() -> None:
    documents, holdout = notes(60, seed=4), notes(60, seed=5)
    of_documents, of_holdout = _runs(documents, documents, holdout=holdout), _runs(holdout, documents, holdout=holdout)
    assert of_documents.paired
    assert of_documents.held_out
    assert of_documents.paired.median > 2 * of_documents.held_out.median
    assert of_holdout.paired
    assert of_holdout.held_out
    assert of_holdout.held_out.median > 2 * of_holdout.paired.median


@pytest.mark.parametrize(
    ("text", "start", "length", "words"),
    [("one two three", 0, 13, 3), ("one two three", 0, 6, 1), ("one two three", 1, 6, 1), ("one two", 1, 1, 0)],
)
def test_only_whole_words_are_counted(text: str, start: int, length: int, words: int) -> None:
    assert words_of(text, start, length) == words
