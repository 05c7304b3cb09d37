"""Where a pool has too few candidates and where too many: votes beside those that the pool would give itself. Pure.

A candidate in the middle of its cloud is among the nearest of many texts, whatever they are: a hub (Radovanovic et al.
2010, JMLR 11). Highest votes first therefore picks the middle and loses the rims. But how many votes a candidate would
have if the documents were like the pool can be counted: each candidate votes, as a document would, for its nearest
others. Votes over those votes say how much denser the documents are there than the pool, whether it is a hub or not.

The same ratio tells what a text that nobody voted on is worth, from those near to it.

Votes are noised and embeddings of candidates are public: by post-processing all of it costs no privacy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from common.errors import ProtocolError

Embeddings = NDArray[np.float32]
Ratios = NDArray[np.float64]
Similarity = Literal["cosine", "l2", "inner"]

MOST_VOTERS = 20_000
"""Of a code's candidates, evenly spaced, whose votes are counted: time then grows with the candidates, not with their
square."""

NEAR = 15
"""Candidates that a new text's ratio is told from (measured: 5 are as good)."""

WARMTH = 0.1
"""How fast a candidate's say fades with its similarity, in units of cosine."""

_BLOCK = 1 << 22
"""Pairs looked at together: 16 MB of float32."""


def votes_of_pool(embeddings: Embeddings, neighbours: int, similarity: Similarity) -> Ratios:
    """Votes that a code's candidates would give each other: float64 ``(J,)``, ``neighbours`` on average.

    Parameters
    ----------
    embeddings
        Of one code's candidates, ``(J, d)``.
    neighbours
        K; none votes for itself, so it is J - 1 if there are no more.
    similarity
        As the sites rank by; see `client_weak.neighbours.comparable`.

    Raises
    ------
    ProtocolError
        If an embedding isn't finite.
    """
    if not np.isfinite(embeddings).all():
        raise ProtocolError("density: an embedding of a candidate isn't finite")
    candidates = len(embeddings)
    each = min(neighbours, candidates - 1)
    if each < 1:
        return np.zeros(candidates)
    votes = np.zeros(candidates)
    voters = np.unique(np.linspace(0, candidates - 1, min(candidates, MOST_VOTERS)).round().astype(np.int64))
    for rows, alike in _similarities(embeddings[voters], embeddings, similarity):
        alike[np.arange(len(alike)), voters[rows]] = -np.inf
        nearest = np.argpartition(-alike, each - 1, axis=1)[:, :each]
        votes += np.bincount(nearest.ravel(), minlength=candidates)
    return np.asarray(votes * (candidates / voters.size))


def density_ratio(votes: Ratios, of_pool: Ratios, neighbours: int) -> Ratios:
    """How much denser the documents are around each candidate than the pool is, up to a factor: ``(J,)``.

    Parameters
    ----------
    votes
        Denoised, none negative, ``(J,)``.
    of_pool
        As `votes_of_pool` counts them.
    neighbours
        K, the mean of ``of_pool``, which is added to it: a few votes for a candidate whom the pool gives none say
        little. Twice as much keeps more of the middle and less of the rims (measured).
    """
    return np.asarray(votes / (of_pool + max(neighbours, 1)))


def told_by_neighbours(ratios: Ratios, embeddings: Embeddings, texts: Embeddings) -> Ratios:
    """Ratios of new texts of a code, as the mean of the nearest candidates', nearer ones counting more.

    Parameters
    ----------
    ratios, embeddings
        Of the code's candidates, ``(J,)`` and ``(J, d)``.
    texts
        Of the new ones, float32 ``(n, d)``.

    Returns
    -------
    ndarray
        float64 ``(n,)``; 0 where there is no candidate.
    """
    told, near = np.zeros(len(texts)), min(NEAR, len(ratios))
    if not near:
        return told
    for rows, alike in _similarities(texts, embeddings, "cosine"):
        nearest = np.argpartition(-alike, near - 1, axis=1)[:, :near]
        found = np.take_along_axis(alike, nearest, axis=1).astype(np.float64)
        say = np.exp((found - found.max(axis=1, keepdims=True)) / WARMTH)
        told[rows] = (say * ratios[nearest]).sum(axis=1) / say.sum(axis=1)
    return told


def _similarities(
    texts: Embeddings, candidates: Embeddings, similarity: Similarity
) -> Iterator[tuple[slice, NDArray[np.float32]]]:
    """(rows of ``texts``, what ranks candidates for them, float32 ``(rows, J)``), block by block."""
    own = texts.astype(np.float64)
    others, shift = candidates.astype(np.float64), np.zeros(len(candidates))
    if similarity == "cosine":
        own, others = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12) for x in (own, others))
    elif similarity == "l2":
        shift = 0.5 * (others**2).sum(axis=1)
    left, right, less = own.astype(np.float32), others.astype(np.float32), shift.astype(np.float32)
    step = max(1, _BLOCK // max(len(right), 1))
    for start in range(0, len(left), step):
        rows = slice(start, min(start + step, len(left)))
        yield rows, left[rows] @ right.T - less
