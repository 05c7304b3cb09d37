"""MAUVE: the area under the divergence frontier of two sets of texts (Pillutla et al. 2021), from our own features.

Both sets are quantised together by k-means; two histograms over the clusters are compared at every mixture of them. The
published package is under the GPL and needs another k-means library; this is the definition of the paper with that
package's defaults (a tenth as many clusters as texts, scale 5, 90 % of the variance kept), and gives its numbers.

1 is the same distribution. Compare only numbers with the same features and the same number of texts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import trapezoid
from scipy.special import rel_entr

from common.errors import DataError
from server.evaluation.intervals import Estimate, Floats

Vectors = NDArray[np.float32]

SEEDS = 5
FEWEST = 40
"""Texts of each set, without which there aren't clusters to speak of."""

STABLE = 1000
"""Texts of each set below which it can't be told from chance which of two similar corpora is better."""

_TEXTS_PER_CLUSTER = 10
_SCALE = 5.0
_VARIANCE = 0.9
_MIXTURES = 25
_RESAMPLES = 200


@dataclass(frozen=True)
class Mauve:
    """MAUVE over several seeds of k-means.

    Attributes
    ----------
    estimate
        Mean over the seeds; the interval is for the seeds and for the draw of the texts.
    by_seed
        Each seed's own.
    """

    estimate: Estimate
    by_seed: tuple[float, ...]


def mauve(
    first: Vectors, second: Vectors, seeds: int = SEEDS, progress: Callable[[int], None] = lambda done: None
) -> Mauve:
    """MAUVE of two sets of vectors ``(n, d)``, the same up to exchange.

    Raises
    ------
    DataError
        If a set has fewer than `FEWEST` texts.
    """
    fewest = min(len(first), len(second))
    if fewest < FEWEST:
        raise DataError(f"MAUVE: {fewest} texts on one side; at least {FEWEST} are needed")
    points = _reduced(np.concatenate([first, second]))
    clusters = max(2, round(fewest / _TEXTS_PER_CLUSTER))
    values, variances = [], []
    for seed in range(seeds):
        p, q = _histograms(points, len(first), clusters, seed)
        values.append(float(area(p / p.sum(), q / q.sum())))
        variances.append(_variance(p, q, seed))
        progress(seed + 1)
    deviation = float(np.sqrt(np.mean(variances) + np.var(values)))
    return Mauve(Estimate.spread(float(np.mean(values)), deviation, least=0.0, most=1.0), tuple(values))


def area(p: Floats, q: Floats) -> Floats:
    """Area under the divergence frontier of distributions over the same clusters ``(…, clusters)``, 0 to 1."""
    weights = np.linspace(1e-6, 1 - 1e-6, _MIXTURES)[:, None]
    mixed = weights * p[..., None, :] + (1 - weights) * q[..., None, :]
    to_p, to_q = (np.exp(-_SCALE * rel_entr(d[..., None, :], mixed).sum(axis=-1)) for d in (p, q))
    # From mixtures that are all q to ones that are all p, the first rises and the second falls.
    ends = np.zeros((*to_p.shape[:-1], 1)), np.ones((*to_p.shape[:-1], 1))
    x, y = (np.concatenate([a, d, b], axis=-1) for a, d, b in ((ends[0], to_p, ends[1]), (ends[1], to_q, ends[0])))
    return np.asarray(np.clip(trapezoid(y, x, axis=-1), 0, 1), dtype=np.float64)


def _reduced(points: Vectors) -> NDArray[np.float32]:
    from sklearn.decomposition import PCA

    reduced = PCA(n_components=_VARIANCE, svd_solver="full").fit_transform(np.asarray(points, dtype=np.float64))
    return np.asarray(reduced, dtype=np.float32)


def _histograms(points: Vectors, first: int, clusters: int, seed: int) -> tuple[Floats, Floats]:
    from sklearn.cluster import KMeans

    labels = KMeans(clusters, init="random", n_init=1, max_iter=100, random_state=seed).fit_predict(points)
    p, q = (np.bincount(part, minlength=clusters).astype(np.float64) for part in (labels[:first], labels[first:]))
    return p, q


def _variance(p: Floats, q: Floats, seed: int) -> float:
    """Of the area, over draws of as many texts from the same clusters."""
    chance = np.random.default_rng(seed)
    drawn = (chance.multinomial(int(c.sum()), c / c.sum(), size=_RESAMPLES) / c.sum() for c in (p, q))
    return float(area(*drawn).var())
