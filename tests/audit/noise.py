"""Audit of what all else stands on: the noise has its stated scale and shape, and sampling is independent.

Sharper than an attack for the scale: 2e5 cells of noise tell sigma to 0.16 %. Noise is released as the mechanisms
release it, with no unit added. Every test is at `SIGNIFICANCE`; a measurement makes at most four.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from common.privacy.noise import Csprng, LatticeGaussian, discrete_gaussian
from common.privacy.values import ExactCounts
from tests.audit.bounds import correlation_pvalue, discrete_gaussian_pvalue, variance_pvalue
from tests.audit.finding import Audit, Measurement, Progress, quiet

SIGNIFICANCE = 1e-6

NOISE_MULTIPLIER, CLIP, NORMALISER = 0.9, 0.5, 64
LATTICE_CELLS = 200_000

SCALE = 3.0
COUNT_CELLS, COUNTS_AT_ONCE = 100_000, 5_000

RATE, UNITS, DRAWS = 0.064, 2_000, 500

Sampler = Callable[[int, float], NDArray[np.int64]]


def gradient_noise(factor: float = 1.0, progress: Progress = quiet) -> Measurement:
    """`LatticeGaussian` with nothing in it, its noise times ``factor``."""
    sigma = NOISE_MULTIPLIER * CLIP / NORMALISER
    total = LatticeGaussian(
        LATTICE_CELLS, max_grad_norm=CLIP, noise_multiplier=NOISE_MULTIPLIER * factor, randomness=Csprng()
    )
    released = total.release(NORMALISER).array
    progress(1.0)
    pvalues = variance_pvalue(released, sigma), float(stats.kstest(released / sigma, "norm").pvalue)
    return _of_sigma(sigma, released, pvalues)


def count_noise(factor: float = 1.0, progress: Progress = quiet) -> Measurement:
    """`discrete_gaussian` on counts of zero, its noise times ``factor``."""
    parts = []
    for start in range(0, COUNT_CELLS, COUNTS_AT_ONCE):
        parts.append(discrete_gaussian(ExactCounts(np.zeros(COUNTS_AT_ONCE, np.int64), 1), SCALE * factor).array)
        progress((start + COUNTS_AT_ONCE) / COUNT_CELLS)
    released = np.concatenate(parts)
    # At this scale the discrete Gaussian's second and fourth moments are the normal's to all digits.
    pvalues = variance_pvalue(released.astype(np.float64), SCALE), discrete_gaussian_pvalue(released, SCALE)
    return _of_sigma(SCALE, released, pvalues)


def _of_sigma(claim: float, released: NDArray[np.number], pvalues: tuple[float, ...]) -> Measurement:
    sigma = math.sqrt(float(np.mean(np.square(released, dtype=np.float64))))
    return Measurement(f"sigma {claim:.4g}", f"sigma {sigma:.4g}", refuted=min(pvalues) < SIGNIFICANCE)


def sampling(sampler: Sampler, progress: Progress = quiet) -> Measurement:
    """Units are sampled at the rate, on their own: batches vary in size, and neither neighbours nor batches agree."""
    inside = np.zeros((DRAWS, UNITS))
    for draw in range(DRAWS):
        inside[draw, sampler(UNITS, RATE)] = 1
        progress((draw + 1) / DRAWS)
    sizes = inside.sum(axis=1)
    deviation = math.sqrt(UNITS * RATE * (1 - RATE))
    standardised = (inside - RATE) / math.sqrt(RATE * (1 - RATE))
    pvalues = (
        float(stats.binomtest(int(sizes.sum()), inside.size, RATE).pvalue),
        # The variance of a batch's size is that of independent units if all pairs are uncorrelated on average.
        variance_pvalue(sizes - UNITS * RATE, deviation),
        correlation_pvalue(standardised[:, 1:], standardised[:, :-1]),
        correlation_pvalue(standardised[1:], standardised[:-1]),
    )
    return Measurement(
        f"rate {RATE:g}, size {UNITS * RATE:g} +- {deviation:.1f}",
        f"rate {inside.mean():.4f}, size {sizes.mean():.1f} +- {sizes.std():.1f}",
        refuted=min(pvalues) < SIGNIFICANCE,
    )


def shuffled(units: int, sample_rate: float) -> NDArray[np.int64]:
    """Twin: batches of one fixed size, as a shuffling data loader makes them."""
    return np.random.default_rng().permutation(units)[: round(units * sample_rate)]


def audits() -> Iterator[Audit]:
    """All audits of noise and sampling."""
    for name, factor in (("", 1.0), ("noise x0.97", 0.97)):
        yield Audit("gradient noise", name, partial(gradient_noise, factor))
        yield Audit("count noise", name, partial(count_noise, factor))
    yield Audit("Poisson sampling", "", partial(sampling, Csprng().poisson_sample))
    yield Audit("Poisson sampling", "shuffled batches of fixed size", partial(sampling, shuffled))
