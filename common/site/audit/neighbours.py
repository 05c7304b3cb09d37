"""How near each text is to documents, in the space of sentence embeddings; exact, by blocked products."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.models.embedder import Embedder
from common.site.audit.found import Interval, LowEnd, NeighboursFound, Spread
from common.site.audit.groups import Groups
from common.site.audit.sources import OwnDocuments, Texts
from common.site.audit.stages import STEP, Progress

Vectors = NDArray[np.float32]

BLOCK = 1 << 21
"""Pairs looked at together: 8 MB of float32."""

ROUNDING = 1e-3
"""Distances that differ by less are equal: what float32 products may be wrong by near zero."""

FARTHEST = 2.0
"""Distance of opposite vectors of length 1; where there is no neighbour."""


def neighbours_found(
    corpus: Texts, documents: OwnDocuments, groups: Groups, embedder: Embedder, name: str, progress: Progress
) -> NeighboursFound:
    """How near a corpus is to documents, and how near bystanders are."""
    stage = "vectors of "
    texts = _vectors(corpus.texts, embedder, f"{stage}texts", progress)
    own = _vectors(documents.texts, embedder, f"{stage}documents", progress)
    held_out = _vectors(groups.held_out or (), embedder, f"{stage}held-out documents", progress)
    progress("nearest documents", 0)
    paired = two_nearest(texts, own[list(groups.paired)])
    nearest = _merged(paired, two_nearest(texts, own[list(groups.others)]))
    by_chance = None
    if groups.bystanders:
        vectors = own if groups.held_out is None else held_out
        by_chance = two_nearest(vectors[list(groups.places)], own[list(groups.beside)])
    progress("nearest documents", 1)
    return NeighboursFound(
        embedder=name,
        distance=LowEnd.of(nearest[:, 0]),
        ratio=_ratios(nearest),
        bystander_distance=None if by_chance is None else LowEnd.of(by_chance[:, 0]),
        bystander_ratio=None if by_chance is None else _ratios(by_chance),
        nearer=None if groups.held_out is None else _nearer(paired, two_nearest(texts, held_out)),
    )


def unit(vectors: Vectors) -> Vectors:
    """Rows of length 1; a zero stays zero."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(norms, np.float32(1e-12)), dtype=np.float32)


def two_nearest(texts: Vectors, documents: Vectors) -> NDArray[np.float64]:
    """Euclidean distances of each text to the nearest document and to the second nearest.

    Parameters
    ----------
    texts, documents
        Vectors of length 1, float32 ``(n, d)`` and ``(m, d)``; documents are private.

    Returns
    -------
    ndarray
        float64 ``(n, 2)``, `FARTHEST` where there are too few documents. Private.
    """
    nearest = np.full((len(texts), 2), FARTHEST, dtype=np.float64)
    if not len(documents):
        return nearest
    kept = min(2, len(documents))
    step = max(1, BLOCK // len(documents))
    for start in range(0, len(texts), step):
        cosines = texts[start : start + step] @ documents.T
        largest = np.partition(cosines, len(documents) - kept, axis=1)[:, len(documents) - kept :]
        squares = 2 - 2 * np.sort(largest, axis=1)[:, ::-1].astype(np.float64)
        nearest[start : start + step, :kept] = np.sqrt(np.maximum(squares, 0))
    return nearest


def _vectors(texts: Sequence[str], embedder: Embedder, stage: str, progress: Progress) -> Vectors:
    parts = [embedder.embed(())]
    for start in range(0, len(texts), STEP):
        progress(stage, start / len(texts))
        parts.append(embedder.embed(texts[start : start + STEP]))
    return unit(np.concatenate(parts))


def _merged(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    """The two nearest of both groups of documents, float64 ``(n, 2)``."""
    return np.sort(np.concatenate([first, second], axis=1), axis=1)[:, :2]


def _nearer(documents: NDArray[np.float64], held_out: NDArray[np.float64]) -> Interval:
    """Share of texts whose nearest document is nearer than their nearest held-out one; both alike is one half."""
    farther = held_out[:, 0] - documents[:, 0]
    return Interval.of_share(np.where(np.abs(farther) < ROUNDING, 0.5, (farther > 0).astype(np.float64)))


def _ratios(nearest: NDArray[np.float64]) -> Spread:
    # Two documents at no distance at all are equally near.
    apart = nearest[:, 1] > ROUNDING
    ratio = np.divide(nearest[:, 0], nearest[:, 1], out=np.ones(len(nearest)), where=apart)
    return Spread.of(1 - ratio)
