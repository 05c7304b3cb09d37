"""Exact nearest neighbours within a code, at the price of one float32 matrix product, in bounded memory.

What a document votes for may depend on that document and the public pool alone. Floating-point products don't keep
that: a product rounds a row differently with the number of rows beside it, and in a near-tie one document more would
change what others vote for. So vectors are put on a lattice on which a product is exact in float64 whatever the order
of summation, and ranks are those of the exact products.

Float64 for all pairs would take more than twice the time. The float32 product of the same lattice vectors is wrong by
at most a known bound (Higham 2002, section 3.1: n u / (1 - n u) times the vectors' lengths). So it decides where the
gaps are wider than that; what it can't tell apart is multiplied exactly.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
Similarity = Literal["cosine", "l2", "inner"]

BLOCK = 1 << 21
"""Pairs looked at together: 8 MB of float32."""

NO_CANDIDATE = -1

LATTICE_BITS = 20
"""Coordinates are multiples of 2^-20. A product of two vectors of length 1 then is a sum of integers that never exceeds
2^41, and float64 holds integers to 2^53: exact in any order of summation. Float32 holds the coordinates."""

_EXACT = 4096
"""Pairs multiplied exactly at once."""

_ROWS = 2048
"""Documents whose length is made 1 at once."""

_GROUPS = 16
"""Columns of which a row's largest value is taken first: K of those maxima bound the K nearest from below."""


def comparable(documents: Vectors, candidates: Vectors, similarity: Similarity) -> tuple[Vectors, Vectors]:
    """Vectors of length at most 1 whose inner products rank candidates as ``similarity`` does.

    A document's ranks don't change with its own length, which is therefore made 1. Candidates are scaled alike, by the
    pool's longest: public. The distance |a - b| ranks as a.b - |b|^2 / 2, a product with one coordinate more.

    Parameters
    ----------
    documents, candidates
        float32 ``(n, d)``, private, and ``(m, d)``.

    Returns
    -------
    tuple
        float32 ``(n, d)`` and ``(m, d)``; with ``d + 1`` for l2.
    """
    others, more = candidates.astype(np.float64), 0
    if similarity == "cosine":
        others = _unit(others)
    elif similarity == "l2":
        others, more = np.c_[others, -0.5 * (others**2).sum(axis=1)], 1
    longest = float(np.linalg.norm(others, axis=1).max(initial=0.0))
    own = np.empty((len(documents), documents.shape[1] + more), dtype=np.float32)
    # Block by block, so that of many documents there is no second copy in float64.
    for start in range(0, len(documents), _ROWS):
        rows = documents[start : start + _ROWS].astype(np.float64)
        own[start : start + _ROWS] = _unit(np.c_[rows, np.ones((len(rows), more))])
    return own, (others / (longest or 1.0)).astype(np.float32)


def nearest_candidates(
    documents: Vectors,
    document_codes: NDArray[np.integer],
    candidates: Vectors,
    candidate_codes: NDArray[np.integer],
    *,
    neighbours: int,
) -> NDArray[np.int64]:
    """The K candidates of each document's own code with the largest inner products.

    Parameters
    ----------
    documents, candidates
        Vectors of length at most 1, float32 ``(n, d)`` and ``(m, d)`` (see `comparable`). Documents are private.
    document_codes, candidate_codes
        Code indices, ``(n,)`` and ``(m,)``.
    neighbours
        K.

    Returns
    -------
    ndarray
        int64 ``(n, K)``, nearest first, private; ties go to the lower index, and a code with fewer than K candidates
        leaves `NO_CANDIDATE`.
    """
    nearest = np.full((len(document_codes), neighbours), NO_CANDIDATE, dtype=np.int64)
    number = 1 + int(max(np.max(document_codes, initial=-1), np.max(candidate_codes, initial=-1)))
    of_documents, of_candidates = _by_code(document_codes, number), _by_code(candidate_codes, number)
    for rows, columns in zip(of_documents, of_candidates, strict=True):
        if not (rows.size and columns.size):
            continue
        kept = min(neighbours, columns.size)
        others = on_lattice(candidates[columns])
        most_wrong = _most_wrong(others)
        step = max(1, BLOCK // columns.size)
        for start in range(0, rows.size, step):
            block = rows[start : start + step]
            nearest[block, :kept] = columns[_top(on_lattice(documents[block]), others, kept, most_wrong)]
    return nearest


def _by_code(codes: NDArray[np.integer], number: int) -> list[NDArray[np.int64]]:
    """Indices of every code, ascending. Sorted once: a study may have a hundred thousand codes."""
    order = np.argsort(codes, kind="stable")
    return np.split(order, np.searchsorted(codes[order], np.arange(1, number)))


def on_lattice(vectors: Vectors) -> Vectors:
    """Vectors in units of the lattice: whole numbers of at most 2^20, which float32 holds."""
    return np.asarray(np.rint(vectors * np.float32(2.0**LATTICE_BITS)), dtype=np.float32)


def _top(own: Vectors, others: Vectors, kept: int, most_wrong: np.float32) -> NDArray[np.int64]:
    """Indices of the ``kept`` others with the largest exact products with each own vector, ``(n, kept)``."""
    products = own @ others.T
    row, column = _that_may_be_near(products, kept, most_wrong)
    # A row of places for each own vector, by ascending column; those left over lie behind all others.
    first = np.searchsorted(row, np.arange(len(own) + 1))
    place = np.arange(row.size) - first[row]
    columns = np.zeros((len(own), int(np.diff(first).max(initial=kept))), dtype=np.int64)
    values = np.full(columns.shape, -np.inf, dtype=np.float64)
    columns[row, place], values[row, place] = column, products[row, column]
    order = _descending(values)
    unsure, rank = np.nonzero(_near_ties(np.take_along_axis(values, order, axis=1), most_wrong))
    if unsure.size:
        tied = order[unsure, rank]
        for start in range(0, unsure.size, _EXACT):
            some, of = unsure[start : start + _EXACT], tied[start : start + _EXACT]
            a, b = own[some].astype(np.float64), others[columns[some, of]].astype(np.float64)
            values[some, of] = np.einsum("ij,ij->i", a, b)
        again = np.unique(unsure)
        order[again] = _descending(values[again])
    return np.take_along_axis(columns, order[:, :kept], axis=1)


def _descending(values: NDArray[np.float64]) -> NDArray[np.int64]:
    # Stable: of equals the one with the lower index comes first.
    return np.argsort(-values, axis=1, kind="stable")


def _near_ties(descending: NDArray[np.float64], most_wrong: np.float32) -> NDArray[np.bool_]:
    """Which values are nearer to a neighbour in the order than twice what they may be wrong by; the other ones stand.

    An exact value is within the error of the rounded one, so it doesn't pass a neighbour that is farther away.
    """
    with np.errstate(invalid="ignore"):
        gaps = descending[:, :-1] - descending[:, 1:]
    # Between two places that are left over there is no gap but nan, which is no near-tie.
    close = gaps <= 2 * most_wrong
    tied = np.zeros(descending.shape, dtype=np.bool_)
    tied[:, :-1] |= close
    tied[:, 1:] |= close
    return tied


def _that_may_be_near(
    products: Vectors, kept: int, most_wrong: np.float32
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(row, column) of every pair that may be among its row's ``kept`` largest, given how wrong a product may be."""
    width = products.shape[1]
    groups = width // _GROUPS
    if groups < kept:
        maxima = products
    else:
        # Columns of one group lie ``groups`` apart, so that the maximum runs along memory. What is left over takes
        # part in no maximum: the bound only gets lower.
        maxima = products[:, : groups * _GROUPS].reshape(len(products), _GROUPS, groups).max(axis=1)
    if kept < maxima.shape[1]:
        least = np.partition(maxima, maxima.shape[1] - kept, axis=1)[:, maxima.shape[1] - kept]
    else:
        least = maxima.min(axis=1)
    # The kept-th largest by rounded products may be too large by the error, and any pair too small by it.
    row_and_column = np.flatnonzero(products >= (least - 2 * most_wrong)[:, None])
    return row_and_column // width, row_and_column % width


def _most_wrong(others: Vectors) -> np.float32:
    """How far a float32 product of any vector of length 1 with any other may be from the exact one."""
    steps = others.shape[1] * float(np.finfo(np.float32).eps) / 2
    longest = np.linalg.norm(others.astype(np.float64), axis=1).max(initial=0.0)
    # A little more than the bound: a vector on the lattice may be longer than 1 by its rounding, and taking the bound
    # off a product is rounded too.
    return np.float32((steps / (1 - steps) + 2.0**-22) * 1.01 * longest * 2.0**LATTICE_BITS)


def _unit(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rows of length 1; a zero stays zero, near to nothing in particular."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(norms, 1e-12))
