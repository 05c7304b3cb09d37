"""The statistics of the audits: from an adversary's errors to lower bounds of epsilon, and tests of noise.

Every function is pure, and ``significance`` is the probability of being wrong that the caller accepts. Noise can't be
seeded, so a test that ran ten times a day at 95 % would cry wolf every other day: the audits ask for `SIGNIFICANCE`.
"""

from __future__ import annotations

import math

import numpy as np
from dp_accounting import gaussian_mechanism
from numpy.typing import NDArray
from scipy import stats

SIGNIFICANCE = 1e-4
"""Highest probability with which a mechanism that keeps its claim may be called refuted."""

EPSILON_STEP = 0.01
LARGEST_EPSILON = 20.0


def clopper_pearson_upper(errors: int, trials: int, significance: float) -> float:
    """Upper confidence limit of a probability, exact for the binomial (Clopper & Pearson 1934)."""
    if errors >= trials:
        return 1.0
    return float(stats.beta.ppf(1 - significance, errors + 1, trials - errors))


def gdp_mu_bound(false_positives: int, false_negatives: int, trials: int, significance: float) -> float:
    """Lower bound of mu of a mechanism that is Gaussian (Dong, Roth & Su 2022; Nasr et al. 2023, section 4).

    Any test between N(0, 1) and N(mu, 1) has ``isf(FPR) - ppf(FNR) <= mu``. The rates are replaced by upper limits,
    each at half the significance. The threshold behind the counts must have been fixed before the replays.

    Parameters
    ----------
    false_positives, false_negatives
        Of ``trials`` replays without and ``trials`` replays with the unit.
    """
    fpr, fnr = (clopper_pearson_upper(n, trials, significance / 2) for n in (false_positives, false_negatives))
    if fpr >= 1 or fnr >= 1:
        return 0.0
    return max(0.0, float(stats.norm.isf(fpr) - stats.norm.ppf(fnr)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon of a Gaussian mechanism whose sensitivity is ``mu`` standard deviations (Balle & Wang 2018)."""
    return float(gaussian_mechanism.get_epsilon_gaussian(1 / mu, delta)) if mu > 0 else 0.0


def one_run_refutes(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float, significance: float
) -> bool:
    """Whether right guesses in one run refute (epsilon, delta)-DP (Steinke, Nasr & Jagielski 2023, theorem 5.2).

    Each of ``canaries`` units was in the data with probability 1/2, on its own. Guessing ``guesses`` of them, from the
    output of an (epsilon, delta)-DP algorithm, the number W of right ones obeys, with ``p = e^epsilon / (1 +
    e^epsilon)`` and ``f(v) = P[Bin(guesses, p) >= v]``,

        P[W >= v] <= f(v) + 2 * canaries * delta * max_i (f(v - i) - f(v)) / i.
    """
    if not correct:
        return False
    p = 1 / (1 + math.exp(-epsilon))
    i = np.arange(1, correct + 1)
    # P[Bin >= v] is sf(v - 1).
    tail = float(stats.binom.sf(correct - 1, guesses, p))
    slack = float(np.max((stats.binom.sf(correct - i - 1, guesses, p) - tail) / i))
    return tail + 2 * canaries * delta * slack <= significance


def one_run_epsilon(canaries: int, guesses: int, correct: int, delta: float, significance: float) -> float:
    """Lower bound of epsilon from one run: the largest grid value up to which every epsilon is refuted.

    Up to which every one is: the largest refuted one anywhere would be a choice after the fact, as the inequality isn't
    monotone in epsilon.
    """
    bound = 0.0
    for epsilon in np.arange(0.0, LARGEST_EPSILON, EPSILON_STEP):
        if not one_run_refutes(canaries, guesses, correct, float(epsilon), delta, significance):
            break
        bound = float(epsilon)
    return bound


def variance_pvalue(values: NDArray[np.floating], deviation: float) -> float:
    """Two-sided chi-square test that normal ``values`` have mean 0 and this standard deviation."""
    statistic = float(np.sum(np.square(values, dtype=np.float64))) / deviation**2
    return 2 * float(min(stats.chi2.cdf(statistic, values.size), stats.chi2.sf(statistic, values.size)))


def discrete_gaussian_pvalue(values: NDArray[np.integer], scale: float) -> float:
    """Chi-square test of whole numbers against ``exp(-k^2 / (2 scale^2))``, normalised; rare values are pooled."""
    reach = math.ceil(12 * scale)
    k = np.arange(-reach, reach + 1)
    mass = np.exp(-(k**2) / (2 * scale**2))
    expected = mass / mass.sum() * values.size
    common = k[expected >= 10]
    inner = (k >= common[0]) & (k <= common[-1])
    observed = np.bincount(np.clip(values, -reach, reach) + reach, minlength=k.size)
    pooled = [np.r_[v[inner], v[~inner].sum()] for v in (observed, expected)]
    return float(stats.chisquare(*pooled).pvalue)


def correlation_pvalue(first: NDArray[np.floating], second: NDArray[np.floating]) -> float:
    """Two-sided test that standardised, equally shaped values are uncorrelated."""
    z = float(np.sum(first * second)) / math.sqrt(first.size)
    return 2 * float(stats.norm.sf(abs(z)))
