"""Word sequences: counted as by hand; copies are more of documents than of held-out ones, other notes aren't."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from common.site.audit.found import SequencesFound
from common.site.audit.groups import Groups
from common.site.audit.ngrams import count_known, distinct_sequences, sequences_found
from common.site.audit.sources import OwnDocuments, Texts
from common.site.audit.words import Words
from tests.common.site.audit.notes import notes

DOCUMENTS, HOLDOUT = notes(300, seed=1), notes(300, seed=2)

SENTENCES = st.lists(st.lists(st.sampled_from(["Ill", "well", "seen", "TODAY"]), max_size=8).map(", ".join), max_size=5)


def _sequences(texts: Sequence[str], holdout: Sequence[str] | None = HOLDOUT) -> tuple[SequencesFound, ...]:
    own = OwnDocuments.of(DOCUMENTS, range(len(DOCUMENTS)))
    corpus = Texts(tuple(texts), tuple(range(1, len(texts) + 1)))
    return sequences_found(corpus, own, Groups.of(own, holdout), lambda stage, share: None)


@given(SENTENCES, SENTENCES, st.integers(1, 4))
def test_counts_are_those_of_a_naive_count(texts: list[str], documents: list[str], size: int) -> None:
    total, hits = count_known(Words.of(texts), size, [distinct_sequences(Words.of(documents), size)])
    known = {run for document in documents for run in _runs(document, size)}
    assert total.tolist() == [len(_runs(text, size)) for text in texts]
    assert hits[0].tolist() == [sum(run in known for run in _runs(text, size)) for text in texts]


def test_other_notes_are_in_documents_no_more_than_in_held_out_ones() -> None:
    for part in _sequences(notes(300, seed=3)):
        assert part.excess
        assert part.excess.low <= 0.005
        assert part.only_documents is not None
        assert part.only_held_out is not None
        assert abs(part.only_documents - part.only_held_out) < 0.1
        assert part.bystanders is not None
        assert abs(part.share - part.bystanders) < 0.02


def test_copies_are_in_documents_alone() -> None:
    for part in _sequences([*notes(270, seed=3), *DOCUMENTS[:30]]):
        assert part.excess
        assert part.excess.low > 0.02
        assert part.only_documents is not None
        assert part.only_held_out is not None
        assert part.only_documents > part.only_held_out + 0.03


def test_without_held_out_documents_it_is_told_beside_those_of_other_units() -> None:
    clean, copied = _sequences(notes(300, seed=3), None)[1], _sequences(DOCUMENTS[:30], None)[1]
    assert clean.bystanders == copied.bystanders
    assert clean.bystanders is not None
    assert clean.share < clean.bystanders + 0.02
    assert copied.share == 1
    assert clean.excess is None


def test_texts_of_few_words_have_no_sequences() -> None:
    for part in _sequences(["Good.", "Thank you"]):
        assert (part.sequences, part.share, part.excess) == (0, 0.0, None)


def _runs(text: str, size: int) -> list[tuple[str, ...]]:
    words = text.lower().replace(",", "").split()
    return [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
