"""What a site's releases cost, as one joint (epsilon, delta), and the noise that a given promise needs.

Neighbouring relation: add or remove one privacy unit. Every mechanism below is a Gaussian on a vector whose L2
sensitivity is proved where the vector is bounded (`common.privacy.bounding`, `common.privacy.noise`):

===============  ==============================================  ==========================================
release          mechanism                                       event
===============  ==============================================  ==========================================
one train step   Gaussian on a sum of unit gradients, each of    `SubsampledGaussian`: a unit is in the
                 norm <= C, units drawn by Poisson sampling      batch with probability q, else unchanged
profile          discrete Gaussian on counts; one unit moves at  `DiscreteGaussian`: c-fold composition of
                 most c cells by 1                               the one-cell mechanism
votes            discrete Gaussian on counts; one unit moves at  `DiscreteGaussian`: K-fold composition of
                 most K cells by 1                               the one-cell mechanism
===============  ==============================================  ==========================================

All releases of a site in a study are composed at once as privacy loss distributions (PLD, dp-accounting) rather than
by adding epsilons: the parameters are fixed by the study before data is touched, so adaptive composition of the
dominating pairs holds, and for the same promise 5-20 % less noise is needed. The Gaussian-DP central limit
approximation is never used: it under-reports epsilon.

    plan = plan_weak(epsilon=4.0, delta=1e-4, votes_per_unit=8, codes_per_unit=1, profile_share=0.02)
    plan.votes.scale, plan.epsilon        # noise to add; verified joint epsilon, at most 4.0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from dp_accounting import gaussian_mechanism
from dp_accounting.pld import privacy_loss_distribution as pld

from common.errors import PrivacyError

SEARCH_INTERVAL = 1e-3
"""Discretisation of the privacy loss while searching, finer for small epsilons; pessimistic at any size."""

VERIFY_INTERVAL = 1e-4
"""Discretisation of the final check of a found noise scale."""

_TOLERANCE = 1e-4
_SMALLEST_NOISE = 0.05
_LARGEST_NOISE = 1e6


@dataclass(frozen=True)
class SubsampledGaussian:
    """``steps`` Gaussian mechanisms, each on a Poisson sample of the units.

    Attributes
    ----------
    noise_multiplier
        Standard deviation of the noise divided by the L2 sensitivity C.
    sample_rate
        q, probability that a unit is in a step's batch.
    steps
        Number of steps over the whole study.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int

    def __post_init__(self) -> None:
        _require("noise_multiplier", self.noise_multiplier, self.noise_multiplier > 0, "a number above 0")
        _require("sample_rate", self.sample_rate, 0 < self.sample_rate <= 1, "a number above 0 and at most 1")
        _require("steps", self.steps, self.steps >= 1, "at least 1")

    def loss(self, interval: float) -> pld.PrivacyLossDistribution:
        """Privacy loss distribution of all steps together."""
        one = pld.from_gaussian_mechanism(
            self.noise_multiplier, sampling_prob=self.sample_rate, value_discretization_interval=interval
        )
        return one.self_compose(self.steps)


@dataclass(frozen=True)
class DiscreteGaussian:
    """One vector of counts with discrete Gaussian noise.

    Attributes
    ----------
    scale
        Sigma of the discrete Gaussian, in counts.
    cells_per_unit
        Most cells that one unit moves, each by exactly 1.
    """

    scale: float
    cells_per_unit: int

    def __post_init__(self) -> None:
        _require("scale", self.scale, self.scale > 0, "a number above 0")
        _require("cells_per_unit", self.cells_per_unit, self.cells_per_unit >= 1, "at least 1")

    def loss(self, interval: float) -> pld.PrivacyLossDistribution:
        """Privacy loss distribution: exact, since every moved cell moves by 1 and cells carry independent noise."""
        one = pld.from_discrete_gaussian_mechanism(self.scale, value_discretization_interval=interval)
        return one.self_compose(self.cells_per_unit) if self.cells_per_unit > 1 else one


Mechanism = SubsampledGaussian | DiscreteGaussian


@dataclass(frozen=True)
class StrongPlan:
    """Everything a strong site will release, and what it costs."""

    training: SubsampledGaussian
    profile: DiscreteGaussian
    epsilon: float
    delta: float

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """The composed mechanisms."""
        return (self.training, self.profile)


@dataclass(frozen=True)
class WeakPlan:
    """Everything a weak site will release, and what it costs."""

    votes: DiscreteGaussian
    profile: DiscreteGaussian
    epsilon: float
    delta: float

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """The composed mechanisms."""
        return (self.votes, self.profile)


PrivacyPlan = StrongPlan | WeakPlan


def joint_epsilon(mechanisms: Iterable[Mechanism], delta: float, interval: float = VERIFY_INTERVAL) -> float:
    """Epsilon at ``delta`` of all ``mechanisms`` composed; pessimistic.

    Raises
    ------
    PrivacyError
        If there is no mechanism, or delta isn't in (0, 1).
    """
    _require("delta", delta, 0 < delta < 1, "a number above 0 and below 1")
    losses = [mechanism.loss(interval) for mechanism in mechanisms]
    if not losses:
        raise PrivacyError("joint_epsilon: no mechanisms; at least one is needed")
    total = losses[0]
    for loss in losses[1:]:
        total = total.compose(loss)
    return float(total.get_epsilon_for_delta(delta))


def profile_mechanism(epsilon: float, delta: float, *, profile_share: float, codes_per_unit: int) -> DiscreteGaussian:
    """The profile's noise: it takes ``profile_share`` of the squared signal mu^2 that (epsilon, delta) allows.

    A Gaussian with L2 sensitivity sqrt(c) and scale s has mu^2 = c / s^2; the whole budget is mu^2 = 1 / sigma*^2,
    where sigma* is the analytic Gaussian's scale (Balle & Wang 2018). Independent Gaussians add their mu^2.
    """
    _check_promise(epsilon, delta)
    _require("profile_share", profile_share, 0 < profile_share < 1, "a number above 0 and below 1")
    whole = _analytic_sigma(epsilon, delta)
    return DiscreteGaussian(whole * math.sqrt(codes_per_unit / profile_share), codes_per_unit)


def plan_strong(
    epsilon: float, delta: float, *, sample_rate: float, steps: int, profile_share: float, codes_per_unit: int
) -> StrongPlan:
    """Solve for the training noise such that all steps and the profile together cost at most (epsilon, delta).

    Parameters
    ----------
    epsilon, delta
        The joint promise.
    sample_rate, steps
        q and the number of DP-SGD steps over all rounds.
    profile_share, codes_per_unit
        See `profile_mechanism`.

    Raises
    ------
    PrivacyError
        If a parameter has no meaning, or no noise scale keeps the promise.
    """
    profile = profile_mechanism(epsilon, delta, profile_share=profile_share, codes_per_unit=codes_per_unit)

    def mechanisms(noise_multiplier: float) -> tuple[Mechanism, ...]:
        return SubsampledGaussian(noise_multiplier, sample_rate, steps), profile

    noise_multiplier, reached = _smallest_noise(mechanisms, epsilon, delta)
    return StrongPlan(SubsampledGaussian(noise_multiplier, sample_rate, steps), profile, reached, delta)


def plan_weak(
    epsilon: float, delta: float, *, votes_per_unit: int, profile_share: float, codes_per_unit: int
) -> WeakPlan:
    """Solve for the vote noise such that profile and votes together cost at most (epsilon, delta).

    In the continuous case the answer is closed: ``sigma* sqrt(K / (1 - share))``. The exact discrete distribution
    decides, since for scales below 1 the two differ in both directions.

    Raises
    ------
    PrivacyError
        If a parameter has no meaning, or no noise scale keeps the promise.
    """
    _require("votes_per_unit", votes_per_unit, votes_per_unit >= 1, "at least 1")
    profile = profile_mechanism(epsilon, delta, profile_share=profile_share, codes_per_unit=codes_per_unit)

    def mechanisms(scale: float) -> tuple[Mechanism, ...]:
        return DiscreteGaussian(scale, votes_per_unit), profile

    closed_form = _analytic_sigma(epsilon, delta) * math.sqrt(votes_per_unit / (1 - profile_share))
    scale, reached = _smallest_noise(mechanisms, epsilon, delta, guess=closed_form)
    return WeakPlan(DiscreteGaussian(scale, votes_per_unit), profile, reached, delta)


def describe(mechanism: Mechanism) -> dict[str, Any]:
    """A mechanism as plain values, for a ledger or a statement."""
    kind = "subsampled-gaussian" if isinstance(mechanism, SubsampledGaussian) else "discrete-gaussian"
    return {"mechanism": kind, **asdict(mechanism)}


def _smallest_noise(
    mechanisms: Callable[[float], tuple[Mechanism, ...]], epsilon: float, delta: float, guess: float = 1.0
) -> tuple[float, float]:
    """Smallest noise (to a relative 1e-4) whose verified joint epsilon is at most ``epsilon``, and that epsilon."""

    def keeps(noise: float, interval: float) -> bool:
        return joint_epsilon(mechanisms(noise), delta, interval) <= epsilon

    interval = max(VERIFY_INTERVAL, min(SEARCH_INTERVAL, epsilon / 4000))
    low = high = guess
    while not keeps(high, interval):
        low, high = high, high * 1.5
        if high > _LARGEST_NOISE:
            raise PrivacyError(f"no noise keeps epsilon={epsilon}, delta={delta}: the profile alone may exceed it")
    while low > _SMALLEST_NOISE and keeps(low, interval):
        low, high = low / 1.5, low
    while high / low > 1 + _TOLERANCE:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if keeps(middle, interval) else (middle, high)
    while (reached := joint_epsilon(mechanisms(high), delta, VERIFY_INTERVAL)) > epsilon:
        high *= 1 + _TOLERANCE
    return high, reached


def _analytic_sigma(epsilon: float, delta: float) -> float:
    return float(gaussian_mechanism.get_sigma_gaussian(epsilon, delta))


def _check_promise(epsilon: float, delta: float) -> None:
    _require("epsilon", epsilon, math.isfinite(epsilon) and epsilon > 0, "a finite number above 0")
    _require("delta", delta, 0 < delta < 1, "a number above 0 and below 1")


def _require(name: str, value: float, holds: bool, accepted: str) -> None:
    if not holds:
        raise PrivacyError(f"{name} is {value!r}; {accepted} is accepted")
