"""A corpus with planted copies passes the limits, one without doesn't; and the result has no text in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import pytest

from common.errors import DataError
from common.models.embedder import load_embedder
from common.site.audit import leak_check
from common.site.audit.found import LeakCheck
from common.site.audit.known_values import values_of
from common.site.audit.leak_check import check_leaks
from common.site.audit.limits import Limits
from common.site.audit.sources import OwnDocuments, Texts
from common.study import Voting
from tests.common.site.audit.notes import notes

DOCUMENTS, HOLDOUT, OTHERS = notes(150, seed=1), notes(150, seed=2), notes(150, seed=3)


@pytest.fixture(autouse=True, scope="module")
def _one_embedder() -> Iterator[None]:
    """The real one, loaded once."""
    embedder = cache(lambda: load_embedder(Voting()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leak_check, "load_embedder", lambda voting, models: embedder())
        yield


def _check(
    texts: Sequence[str],
    holdout: Sequence[str] | None = HOLDOUT,
    documents: Sequence[str] = DOCUMENTS,
    limits: Limits = Limits(),
) -> LeakCheck:
    own = OwnDocuments.of(documents, range(len(documents)))
    return check_leaks(Texts(tuple(texts), tuple(range(1, len(texts) + 1))), own, holdout, limits)


def _of_kind(check: LeakCheck, kind: str) -> tuple[int, int, int]:
    [found] = [found for found in check.identifiers if found.kind == kind]
    return found.distinct, found.in_documents, found.rare


@pytest.mark.parametrize("holdout", [None, HOLDOUT])
def test_a_corpus_that_copies_nothing_passes_no_limit(holdout: list[str] | None) -> None:
    assert _check(OTHERS, holdout).findings == ()


@pytest.mark.parametrize("holdout", [None, HOLDOUT])
def test_three_copies_in_a_hundred_and_fifty_pass_a_limit(holdout: list[str] | None) -> None:
    [finding] = _check([*OTHERS[:147], *DOCUMENTS[:3]], holdout).findings
    assert finding.startswith("3 texts share a run of 100 characters or more")
    assert finding.endswith("rows 148, 149, 150")


def test_many_near_copies_pass_the_limits_of_sequences_and_neighbours_too() -> None:
    # Cut up so that no run is long.
    near = [" ".join(part + ", well," for part in note.split(",")) for note in DOCUMENTS]
    five, eight, nearer = _check(near).findings
    assert "sequences of 5 words are in documents beyond what is in as many held-out ones" in five
    assert "sequences of 8 words are in documents beyond what is in as many held-out ones" in eight
    assert "nearer to documents than to as many held-out ones" in nearer


def test_copies_of_held_out_documents_pass_no_limit() -> None:
    assert _check(HOLDOUT).findings == ()


def test_limits_are_the_sites() -> None:
    texts = [*OTHERS[:149], DOCUMENTS[0]]
    assert _check(texts).findings
    assert not _check(texts, limits=Limits(shared_characters=10_000, whole_characters=10_000)).findings


def test_an_identifier_of_one_document_passes_a_limit_and_of_many_does_not() -> None:
    rare = [f"{DOCUMENTS[0]} Call 020 7946 0018.", *DOCUMENTS[1:]]
    common = [f"{note} Call 020 7946 0018." for note in DOCUMENTS]
    text = f"{OTHERS[0]} Telephone 02079460018, please."
    other = f"{OTHERS[0]} Telephone 02079460019, please."
    [finding] = _check([text, *OTHERS[1:]], documents=rare).findings
    assert finding.startswith("phone number: 1 of 1 different ones is also in documents of fewer than 5 units")
    assert finding.endswith("row 1")
    assert _of_kind(_check([text, *OTHERS[1:]], documents=common), "phone number") == (1, 1, 0)
    assert _check([text, *OTHERS[1:]], documents=common).findings == ()
    assert _of_kind(_check([other, *OTHERS[1:]], documents=rare), "phone number") == (1, 0, 0)
    assert _check([other, *OTHERS[1:]], documents=rare).findings == ()


def test_birth_dates_that_meet_by_chance_pass_no_limit_and_copied_ones_do() -> None:
    chance = np.random.default_rng(0)

    def born(some: Sequence[str]) -> list[str]:
        days = chance.integers(1, 29, (len(some), 2))
        return [f"{note} Born {day}/0{1 + month % 3}/1950." for note, (day, month) in zip(some, days, strict=True)]

    documents, holdout, texts = born(DOCUMENTS[:90]), born(HOLDOUT[:90]), born(OTHERS[:60])
    by_chance = _check(texts, holdout, documents)
    [dates] = [found for found in by_chance.identifiers if found.kind == "date of birth"]
    assert dates.rare > 5
    assert abs(dates.by_chance - dates.rare) < 3 * dates.by_chance**0.5
    assert by_chance.findings == ()
    copied = [f"{note} Born 0{1 + i % 9}/0{1 + i // 9}/1961." for i, note in enumerate(OTHERS[:60])]
    own = [f"{note} DOB 0{1 + i % 9}/0{1 + i // 9}/1961." for i, note in enumerate(DOCUMENTS[:60])]
    assert any("date of birth" in finding for finding in _check(copied, holdout, [*own, *documents]).findings)


def test_names_of_the_sites_columns_are_looked_for() -> None:
    surnames = ["Ash", "Elm", "Fir", "Oak", "Yew"]
    names = [f"{given} {surname}" for given in ["Ann", "Bob", "Cyd", "Dee", "Eve"] for surname in surnames]
    values = tuple(values_of("name", name) for name in names)
    own = OwnDocuments(tuple(DOCUMENTS[:25]), np.arange(25), values)
    for name, findings in (("Cyd Fir", 1), ("Cyd Birch", 0)):
        texts = (f"{OTHERS[0]} We thank {name} for it.", *OTHERS[1:50])
        check = check_leaks(Texts(texts, tuple(range(1, 51))), own, None)
        assert len(check.findings) == findings
        assert _of_kind(check, "column 'name'") == ((1, 1, 1) if findings else (0, 0, 0))


def test_a_surname_alone_is_counted_but_makes_no_finding() -> None:
    own = OwnDocuments(tuple(DOCUMENTS), np.arange(150), (values_of("surname", "Birch"),) + (frozenset(),) * 149)
    check = check_leaks(Texts((f"{OTHERS[0]} Birch trees.", *OTHERS[1:50]), tuple(range(1, 51))), own, None)
    assert _of_kind(check, "column 'surname', single words") == (1, 1, 1)
    assert check.findings == ()


def test_the_same_files_give_the_same_result() -> None:
    assert _check(OTHERS, HOLDOUT[:100]) == _check(OTHERS, HOLDOUT[:100])


def test_what_is_printed_as_json_has_no_text() -> None:
    documents = [f"{DOCUMENTS[0]} Call 020 7946 0018.", *DOCUMENTS[1:]]
    check = _check([documents[0], *OTHERS], documents=documents)
    assert check.runs.suspects[0].run.startswith(DOCUMENTS[0].casefold()[:20])
    shown = check.model_dump_json() + repr(check) + str(check)
    assert "0018" not in shown
    assert not any(part.casefold() in shown.casefold() for part in DOCUMENTS[0].split(". "))


def test_documents_on_both_sides_are_left_out_of_the_held_out_ones() -> None:
    check = _check(OTHERS, [*HOLDOUT, *(note.upper() for note in DOCUMENTS[:20])])
    assert (check.held_out, check.overlap) == (130, 20)
    with pytest.raises(DataError, match="documents that had no part in the study are needed"):
        _check(OTHERS, DOCUMENTS)


def test_few_documents_say_nothing_of_what_to_expect() -> None:
    check = _check(OTHERS[:5], None, DOCUMENTS[:3])
    assert check.bystanders == 0
    assert check.runs.bystanders is None
    assert check.sequences[0].bystanders is None
    assert check.neighbours.bystander_ratio is None


@pytest.mark.parametrize("text", ["a", "\ud83d\ude00" * 3, "-" * 5000, "ab" * 5000, "\u0301" * 400, "א" * 400])
def test_odd_texts_are_compared_like_others(text: str) -> None:
    text = text.encode("utf-16", "surrogatepass").decode("utf-16")
    check = _check([text, *OTHERS[:20]], None, [text, *DOCUMENTS[:40]])
    assert check.runs.identical == 1
