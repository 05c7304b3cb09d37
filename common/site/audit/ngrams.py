"""How many of the texts' word sequences are in documents, and in held-out ones.

A sequence is known by a 64-bit fingerprint of its words, without case and punctuation. That any two of a million
sequences have the same one by chance is less likely than one in a million, and would change no share that is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.site.audit.found import Interval, SequencesFound
from common.site.audit.groups import Groups
from common.site.audit.sources import OwnDocuments, Texts
from common.site.audit.stages import Progress
from common.site.audit.words import Prints, Words

Ints = NDArray[np.int64]

SIZES = (5, 8)
"""Words of the sequences that are counted."""


def sequences_found(
    corpus: Texts, documents: OwnDocuments, groups: Groups, progress: Progress
) -> tuple[SequencesFound, ...]:
    """Shared word sequences of a corpus, and of bystanders."""
    stage = "sequences of words"
    progress(stage, 0)
    texts, all_documents, held_out, bystanders = (
        Words.of(some) for some in (corpus.texts, documents.texts, groups.held_out or (), groups.bystanders)
    )
    paired, beside = (Words.of([documents.texts[i] for i in indices]) for indices in (groups.paired, groups.beside))
    found = []
    for number, size in enumerate(SIZES):
        progress(stage, (1 + number) / (1 + len(SIZES)))
        total, hits = count_known(texts, size, [distinct_sequences(all_documents, size)])
        by_chance = _share(*count_known(bystanders, size, [distinct_sequences(beside, size)]))
        like = _like_for_like(texts, size, paired, held_out) if held_out.texts else {}
        share = _share(total, hits) or 0.0
        found.append(SequencesFound(words=size, sequences=int(total.sum()), share=share, bystanders=by_chance, **like))
    return tuple(found)


def distinct_sequences(documents: Words, size: int) -> Prints:
    """The distinct sequences of ``size`` words of some documents: fingerprints, ascending. Private."""
    blocks = [np.unique(prints) for prints, _ in documents.sequences(size)]
    return np.unique(np.concatenate([np.zeros(0, dtype=np.uint64), *blocks]))


def count_known(texts: Words, size: int, known: Sequence[Prints]) -> tuple[Ints, Ints]:
    """How many sequences each text has, and how many of them are in each of ``known``.

    Returns
    -------
    tuple
        int64 ``(texts,)`` and ``(known, texts)``.
    """
    total = np.zeros(texts.texts, dtype=np.int64)
    hits = np.zeros((len(known), texts.texts), dtype=np.int64)
    for prints, text in texts.sequences(size):
        order = np.argsort(prints)
        ascending, of = prints[order], text[order]
        total += np.bincount(of, minlength=texts.texts)
        for place, others in enumerate(known):
            hits[place] += np.bincount(of[_contains(others, ascending)], minlength=texts.texts)
    return total, hits


def _like_for_like(texts: Words, size: int, paired: Words, held_out: Words) -> dict[str, Any]:
    """What is in documents beside what is in as many held-out ones."""
    ours, theirs = (distinct_sequences(some, size) for some in (paired, held_out))
    only = [ours[~_contains(theirs, ours)], theirs[~_contains(ours, theirs)]]
    total, hits = count_known(texts, size, [ours, theirs, *only])
    return {
        "paired": _share(total, hits[:1]),
        "held_out": _share(total, hits[1:2]),
        "excess": Interval.of_ratio(hits[0] - hits[1], total) if total.any() else None,
        "only_documents": float((hits[2] > 0).mean()),
        "only_held_out": float((hits[3] > 0).mean()),
    }


def _share(total: Ints, hits: Ints) -> float | None:
    """Share of all sequences that is known, or None where there are none."""
    return float(hits.sum()) / int(total.sum()) if total.any() else None


def _contains(ascending: Prints, wanted: Prints) -> NDArray[np.bool_]:
    if not ascending.size:
        return np.zeros(wanted.shape, dtype=np.bool_)
    place = np.searchsorted(ascending, wanted)
    return np.asarray(ascending[np.minimum(place, ascending.size - 1)] == wanted)
