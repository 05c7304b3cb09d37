"""How far apart two sets of texts are, as points in embedding space.

All of these depend on the number of points. They say something only beside the same number for two sets of real texts
of the same size, which is what the measures put at the good end of their ranges.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.errors import DataError
from server.evaluation.intervals import Estimate, Floats, jackknife, of_mean

Vectors = NDArray[np.float32]

NEIGHBOURS = 5
"""Of a point, within whose distance another one counts as near (Kynkäänniemi et al. 2019, Naeem et al. 2020)."""

_BLOCK = 1 << 22
"""Pairs looked at together: 32 MB of float64."""


def frechet(first: Vectors, second: Vectors) -> float:
    """Fréchet distance of the Gaussians with the mean and covariance of two sets of vectors ``(n, d)`` (Heusel 2017).

    Covariances are shrunk (Ledoit and Wolf 2004), as with fewer points than dimensions they have no inverse; the root
    of their product is taken of symmetric matrices only. Biased upwards, the more so the fewer points there are.
    """
    from sklearn.covariance import ledoit_wolf

    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    of_a, of_b = ledoit_wolf(a)[0], ledoit_wolf(b)[0]
    root = _root(of_a)
    shared = np.sqrt(np.maximum(np.linalg.eigvalsh(root @ of_b @ root), 0)).sum()
    apart = ((a.mean(axis=0) - b.mean(axis=0)) ** 2).sum()
    return max(0.0, float(apart + np.trace(of_a) + np.trace(of_b) - 2 * shared))


def frechet_estimate(first: Vectors, second: Vectors) -> Estimate:
    """The same with an interval, by jackknife; vectors in random order."""
    deviation = jackknife(lambda a, b: frechet(first[a], second[b]), (len(first), len(second)))
    return Estimate.spread(frechet(first, second), deviation, least=0.0)


@dataclass(frozen=True)
class Neighbourhoods:
    """Each is a mean over points whose interval takes the other set as given.

    Attributes
    ----------
    precision
        Share of the synthetic points that are near to a real one: are they realistic?
    recall
        Share of the real points that are near to a synthetic one: is everything there?
    density
        Real points that a synthetic one is near to, over the number of neighbours; 1 for the same distribution.
        Unlike precision it isn't fooled by outliers.
    coverage
        Share of the real points with a synthetic one nearer than their own neighbours.
    """

    precision: Estimate
    recall: Estimate
    density: Estimate
    coverage: Estimate


def neighbourhoods(real: Vectors, synthetic: Vectors, neighbours: int = NEIGHBOURS) -> Neighbourhoods:
    """Precision, recall, density and coverage of synthetic vectors ``(m, d)`` among real ones ``(n, d)``.

    Raises
    ------
    DataError
        If a set has no more points than neighbours.
    """
    fewest = min(len(real), len(synthetic))
    if fewest <= neighbours:
        raise DataError(f"neighbourhoods: {fewest} texts on one side; more than {neighbours} are needed")
    of_real, of_synthetic = _radii(real, neighbours), _radii(synthetic, neighbours)
    near = np.zeros(len(synthetic))
    recalled, nearest = np.zeros(len(real), dtype=np.bool_), np.full(len(real), np.inf)
    for rows, squares in _squares(synthetic, real):
        near[rows] = (squares <= of_real).sum(axis=1)
        recalled |= (squares <= of_synthetic[rows, None]).any(axis=0)
        nearest = np.minimum(nearest, squares.min(axis=0))
    return Neighbourhoods(
        of_mean(near > 0), of_mean(recalled), of_mean(near / neighbours), of_mean(nearest <= of_real)
    )  # fmt: skip


def nearest_two(points: Vectors, others: Vectors, *, themselves: bool = False) -> Floats:
    """Distances of each point to the nearest two of ``others``, float64 ``(n, 2)``, ascending.

    Parameters
    ----------
    themselves
        Whether ``others`` are the same points: then none is its own neighbour.

    Raises
    ------
    DataError
        If there aren't two.
    """
    if len(others) < 2 + themselves:
        raise DataError(f"nearest_two: {len(others)} texts to compare with; at least {2 + themselves} are needed")
    found = np.zeros((len(points), 2))
    for rows, squares in _squares(points, others):
        if themselves:
            squares[np.arange(len(squares)), np.arange(rows.start, rows.stop)] = np.inf
        found[rows] = np.sort(np.partition(squares, 1, axis=1)[:, :2], axis=1)
    return np.sqrt(found)


def _radii(points: Vectors, neighbours: int) -> Floats:
    """Squared distance of each point to its ``neighbours``-th neighbour among the others."""
    radii = np.zeros(len(points))
    for rows, squares in _squares(points, points):
        # Each is the nearest to itself.
        radii[rows] = np.partition(squares, neighbours, axis=1)[:, neighbours]
    return radii


def _squares(first: Vectors, second: Vectors) -> Iterator[tuple[slice, Floats]]:
    """(rows of ``first``, squared distances ``(rows, m)``), block by block."""
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    of_a, of_b = (a**2).sum(axis=1), (b**2).sum(axis=1)
    step = max(1, _BLOCK // len(b))
    for start in range(0, len(a), step):
        rows = slice(start, min(start + step, len(a)))
        squares = of_a[rows, None] + of_b - 2 * (a[rows] @ b.T)
        # What is below is rounding: two equal texts are at distance 0.
        yield rows, np.where(squares < 1e-9, 0.0, squares)


def _root(matrix: Floats) -> Floats:
    values, vectors = np.linalg.eigh(matrix)
    return np.asarray((vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T)
