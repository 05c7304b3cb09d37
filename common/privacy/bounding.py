"""Bounding: how far one privacy unit can move each private value.

A unit is one document (`record`) or all documents of one patient (`patient`). What is kept of a unit depends on that
unit's own documents and the operating system's randomness only, never on other units; otherwise adding one unit could
move the others.

Shapes: ``codes`` int32 ``(documents,)``; ``units`` int32 ``(documents,)`` with values below ``unit_count``;
``nearest`` int64 ``(documents, K)``, candidate indices by rank, -1 where a code has fewer than K candidates.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from common.privacy.noise import Csprng
from common.privacy.values import ExactCounts

Indices = NDArray[np.int64]


def profile_counts(
    codes: NDArray[np.integer], units: NDArray[np.integer], *, number_of_codes: int, codes_per_unit: int
) -> ExactCounts:
    """Units per control code; a unit counts once in each of at most ``codes_per_unit`` distinct codes.

    A unit with more codes keeps those of most of its documents (ties: the lower code index). So one unit moves at most
    c cells by 1: L2 sensitivity sqrt(c).
    """
    pairs, documents = _distinct_pairs(units, codes, number_of_codes)
    unit, code = pairs // number_of_codes, pairs % number_of_codes
    order = np.lexsort((code, -documents, unit))
    kept = order[_rank_in_group(unit[order]) < codes_per_unit]
    counts = np.bincount(code[kept], minlength=number_of_codes).astype(np.int64)
    return ExactCounts(counts, cells_per_unit=codes_per_unit)


def vote_counts(nearest: Indices, units: NDArray[np.integer], *, candidates: int, votes_per_unit: int) -> ExactCounts:
    """Votes per candidate; a unit casts at most ``votes_per_unit`` votes, on distinct candidates, one each.

    The votes of a unit with several documents are filled in turn: every document's nearest candidate first, then every
    document's second, and so on, skipping candidates the unit voted for already. So one unit moves at most K cells by
    1: L2 sensitivity sqrt(K), also where a code has fewer than K candidates.
    """
    documents, ranks = nearest.shape
    rank = np.tile(np.arange(ranks, dtype=np.int64), documents)
    document = np.repeat(np.arange(documents, dtype=np.int64), ranks)
    candidate = nearest.ravel()
    cast = candidate >= 0
    rank, document, candidate = rank[cast], document[cast], candidate[cast]
    unit = np.asarray(units, dtype=np.int64)[document]

    in_turn = np.lexsort((document, rank, unit))
    unit, candidate = unit[in_turn], candidate[in_turn]
    _, first = np.unique(unit * max(candidates, 1) + candidate, return_index=True)
    first.sort()
    unit, candidate = unit[first], candidate[first]
    kept = _rank_in_group(unit) < votes_per_unit
    counts = np.bincount(candidate[kept], minlength=candidates).astype(np.int64)
    return ExactCounts(counts, cells_per_unit=votes_per_unit)


def sample_documents(order: Indices, offsets: Indices, *, sample_rate: float, randomness: Csprng) -> Indices:
    """Poisson-sample units, and draw one random document of each sampled unit.

    Parameters
    ----------
    order, offsets
        Documents of unit ``u`` are ``order[offsets[u]:offsets[u + 1]]``; offsets has shape ``(unit_count + 1,)``.

    Returns
    -------
    Indices
        Document indices of this step's batch; private, possibly empty. One unit adds at most one gradient.
    """
    sampled = randomness.poisson_sample(offsets.size - 1, sample_rate)
    starts, sizes = offsets[sampled], offsets[sampled + 1] - offsets[sampled]
    return order[starts + randomness.below(sizes)]


def _distinct_pairs(
    units: NDArray[np.integer], codes: NDArray[np.integer], number_of_codes: int
) -> tuple[Indices, Indices]:
    keys = np.asarray(units, dtype=np.int64) * number_of_codes + np.asarray(codes, dtype=np.int64)
    pairs, documents = np.unique(keys, return_counts=True)
    return pairs, documents.astype(np.int64)


def _rank_in_group(sorted_groups: Indices) -> Indices:
    """Position of every element within its run of equal values."""
    if not sorted_groups.size:
        return np.zeros(0, dtype=np.int64)
    starts = np.flatnonzero(np.r_[True, sorted_groups[1:] != sorted_groups[:-1]])
    lengths = np.diff(np.r_[starts, sorted_groups.size])
    return np.arange(sorted_groups.size, dtype=np.int64) - np.repeat(starts, lengths)
