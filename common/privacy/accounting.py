"""What a site's releases cost, as one joint (epsilon, delta), and the noise that a given promise needs.

Unit and neighbours. A privacy unit is one record or one patient, as the study says. Two data sets are neighbours if one
has one unit more. Everything below holds for both directions.

Training step (strong sites, R x E of them)
    Mechanism     Gaussian of standard deviation sigma C on the sum of clipped gradients of a Poisson batch.
    Sensitivity   C. A unit puts at most one document into a batch and that document's gradient is clipped to C by
                  itself; what other units put there depends on neither its presence nor its text.
    Event         `SubsampledGaussian`: a unit is in the batch with probability q, else it changes nothing.
    Where         `common.privacy.bounding.sample_documents`, `common.privacy.noise.LatticeGaussian`.

Profile (every site, once)
    Mechanism     discrete Gaussian on the number of units under each control code.
    Sensitivity   sqrt(c). A unit counts once in each of at most c codes, chosen from its own documents alone: at most c
                  cells move, by 1 each.
    Event         `DiscreteGaussian`: c-fold composition of the one-cell mechanism, since cells carry independent noise.
    Where         `common.privacy.bounding.profile_counts`, `common.privacy.noise.discrete_gaussian`.

Votes (weak sites, once)
    Mechanism     discrete Gaussian on the number of votes for each candidate.
    Sensitivity   sqrt(R). A unit casts at most R votes on distinct candidates, chosen from its own documents and the
                  public pool alone: at most R cells move, by 1 each, also where a code has fewer candidates.
    Event         `DiscreteGaussian`: R-fold composition of the one-cell mechanism.
    Where         `common.privacy.bounding.vote_counts`, `common.privacy.noise.discrete_gaussian`.

All releases of a site in a study are composed at once as privacy loss distributions (PLD, dp-accounting) rather than
by adding epsilons: the parameters are fixed by the study before data is touched, so adaptive composition of the
dominating pairs holds, and for the same promise 5-20 % less noise is needed. ``accounting="paper"`` adds instead, as
RAFT does, so that both can be compared. The Gaussian-DP central limit approximation is never used: it under-reports
epsilon. Between studies, whose parameters may depend on earlier outputs, a site adds up or uses a Renyi filter
(`renyi_budget`).

    plan = plan_weak(epsilon=4.0, delta=1e-4, votes_per_unit=8, codes_per_unit=1, profile_share=0.02)
    plan.votes.scale, plan.epsilon        # noise to add; verified joint epsilon, at most 4.0
    plan_weak(epsilon=None, delta=1e-4, noise_multiplier=2.0, ...)      # the noise is given: epsilon is solved
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import reduce
from typing import Any, Literal

import numpy as np
from dp_accounting import gaussian_mechanism
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.special import gammaln, logsumexp

from common.errors import PrivacyError

SEARCH_INTERVAL = 1e-3
"""Discretisation of the privacy loss while searching, finer for small epsilons; pessimistic at any size."""

VERIFY_INTERVAL = 1e-4
"""Discretisation of the final check of a found noise scale."""

Accounting = Literal["joint", "paper"]
"""How a site's releases in one study are composed: all at once, or by adding up a split budget (RAFT)."""

_TOLERANCE = 1e-4
_SMALLEST_NOISE = 0.05
_LARGEST_NOISE = 1e6
_SMALLEST_DELTA = 1e-15
_ORDERS = range(2, 1025)


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

    def renyi(self, order: int) -> float:
        """Renyi divergence of a whole ``order`` of at least 2 (Mironov, Talwar & Zhang 2019)."""
        k = np.arange(order + 1, dtype=np.float64)
        binomial = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
        exponent = k * (k - 1) / (2 * self.noise_multiplier**2)
        if self.sample_rate == 1:
            return float(self.steps * exponent[-1] / (order - 1))
        terms = binomial + k * math.log(self.sample_rate) + (order - k) * math.log1p(-self.sample_rate) + exponent
        return float(self.steps * logsumexp(terms) / (order - 1))


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

    def renyi(self, order: int) -> float:
        """Renyi divergence; the continuous Gaussian's, which bounds it (Canonne, Kamath & Steinke 2020)."""
        return order * self.cells_per_unit / (2 * self.scale**2)


Mechanism = SubsampledGaussian | DiscreteGaussian


@dataclass(frozen=True)
class StrongPlan:
    """Everything a strong site will release, and what it costs."""

    training: SubsampledGaussian
    profile: DiscreteGaussian
    epsilon: float
    delta: float
    accounting: Accounting = "joint"

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
    accounting: Accounting = "joint"

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """The composed mechanisms."""
        return (self.votes, self.profile)


PrivacyPlan = StrongPlan | WeakPlan


@dataclass(frozen=True)
class _Solved:
    """Noise multiplier of a tier's main mechanism and the profile beside it, with what both cost."""

    noise: float
    profile: DiscreteGaussian
    epsilon: float
    delta: float


def joint_epsilon(mechanisms: Iterable[Mechanism], delta: float, interval: float = VERIFY_INTERVAL) -> float:
    """Epsilon at ``delta`` of all ``mechanisms`` composed; pessimistic.

    Raises
    ------
    PrivacyError
        If there is no mechanism, or delta isn't in (0, 1).
    """
    _require("delta", delta, 0 < delta < 1, "a number above 0 and below 1")
    return float(_composed(mechanisms, interval).get_epsilon_for_delta(delta))


def joint_delta(mechanisms: Iterable[Mechanism], epsilon: float, interval: float = VERIFY_INTERVAL) -> float:
    """Delta at ``epsilon`` of all ``mechanisms`` composed; pessimistic, and never below 1e-15.

    Raises
    ------
    PrivacyError
        If there is no mechanism, or epsilon isn't a finite number above 0.
    """
    _require("epsilon", epsilon, math.isfinite(epsilon) and epsilon > 0, "a finite number above 0")
    return max(float(_composed(mechanisms, interval).get_delta_for_epsilon(epsilon)), _SMALLEST_DELTA)


def plan_strong(
    epsilon: float | None,
    delta: float | None,
    *,
    sample_rate: float,
    steps: int,
    profile_share: float,
    codes_per_unit: int,
    noise_multiplier: float | None = None,
    accounting: Accounting = "joint",
) -> StrongPlan:
    """Plan a strong site: all training steps and one profile.

    Of ``epsilon``, ``delta`` and ``noise_multiplier`` two are given and the third is solved; three are checked.

    Parameters
    ----------
    epsilon, delta
        The joint promise.
    sample_rate, steps
        q and the number of DP-SGD steps over all rounds.
    profile_share, codes_per_unit
        What the profile takes: with joint accounting its share of mu^2, the squared signal of a Gaussian that costs as
        much as the promise allows; with the paper's its share of epsilon. And c, codes a unit counts in.
    noise_multiplier
        Standard deviation of the training noise over C.
    accounting
        ``"joint"``, or ``"paper"``: epsilon and delta are split and added, each part accounted on its own.

    Raises
    ------
    PrivacyError
        If a parameter has no meaning, no noise scale keeps the promise, or three are given and the promise isn't kept.
    """

    def main(noise: float) -> Mechanism:
        return SubsampledGaussian(noise, sample_rate, steps)

    def guess(sigma: float) -> float:
        # Near the answer by the central limit theorem, so the search never meets a noise far too small, whose privacy
        # loss fills the memory: a hostile study could ask for a million steps.
        return max(0.5, sample_rate * math.sqrt(steps) * sigma)

    solved = _solve(epsilon, delta, noise_multiplier, main, profile_share, codes_per_unit, accounting, guess)
    training = SubsampledGaussian(solved.noise, sample_rate, steps)
    return StrongPlan(training, solved.profile, solved.epsilon, solved.delta, accounting)


def with_steps(plan: StrongPlan, steps: int) -> StrongPlan:
    """The same noise for fewer training steps, and what that costs at the same delta.

    A plan of the paper's accounting keeps its epsilon, an upper bound: what it was split into isn't known any more.

    Raises
    ------
    PrivacyError
        If the plan has fewer than ``steps`` already.
    """
    most = plan.training.steps
    _require("steps", steps, 1 <= steps <= most, f"1 to {most}")
    fewer = replace(plan, training=replace(plan.training, steps=steps))
    if plan.accounting == "paper" or steps == most:
        return fewer
    return replace(fewer, epsilon=min(plan.epsilon, joint_epsilon(fewer.mechanisms, plan.delta)))


def plan_weak(
    epsilon: float | None,
    delta: float | None,
    *,
    votes_per_unit: int,
    profile_share: float,
    codes_per_unit: int,
    noise_multiplier: float | None = None,
    accounting: Accounting = "joint",
) -> WeakPlan:
    """Plan a weak site: one ballot and one profile.

    Of ``epsilon``, ``delta`` and ``noise_multiplier`` two are given and the third is solved; three are checked. In the
    continuous case the noise is closed: ``sigma* sqrt(R / (1 - share))``. The exact discrete distribution decides,
    since for scales below 1 the two differ in both directions.

    Parameters
    ----------
    epsilon, delta, profile_share, codes_per_unit, accounting
        As for `plan_strong`.
    votes_per_unit
        R: votes that one unit casts at most.
    noise_multiplier
        Scale of the vote noise over the L2 sensitivity sqrt(R).

    Raises
    ------
    PrivacyError
        As for `plan_strong`.
    """
    _require("votes_per_unit", votes_per_unit, votes_per_unit >= 1, "at least 1")

    def main(noise: float) -> Mechanism:
        return DiscreteGaussian(noise * math.sqrt(votes_per_unit), votes_per_unit)

    solved = _solve(
        epsilon, delta, noise_multiplier, main, profile_share, codes_per_unit, accounting, lambda sigma: sigma
    )
    votes = DiscreteGaussian(solved.noise * math.sqrt(votes_per_unit), votes_per_unit)
    return WeakPlan(votes, solved.profile, solved.epsilon, solved.delta, accounting)


def describe(mechanism: Mechanism) -> dict[str, Any]:
    """A mechanism as plain values, for a ledger or a statement."""
    kind = "subsampled-gaussian" if isinstance(mechanism, SubsampledGaussian) else "discrete-gaussian"
    return {"mechanism": kind, **asdict(mechanism)}


def described(values: Mapping[str, Any]) -> Mechanism:
    """Inverse of `describe`.

    Raises
    ------
    PrivacyError
        If the values describe no mechanism.
    """
    kinds: dict[str, Callable[..., Mechanism]] = {
        "subsampled-gaussian": SubsampledGaussian,
        "discrete-gaussian": DiscreteGaussian,
    }
    rest = {name: value for name, value in values.items() if name != "mechanism"}
    try:
        return kinds[values["mechanism"]](**rest)
    except (KeyError, TypeError) as cause:
        raise PrivacyError(f"mechanism is {dict(values)!r}; what `describe` writes is accepted") from cause


def renyi_budget(epsilon: float, delta: float) -> tuple[int, float]:
    """Order and budget of the Renyi filter that stays within (epsilon, delta).

    A site that keeps the sum of its plans' `renyi_cost` at this one order within this budget is (epsilon, delta)-DP
    over all of them, also if every plan was chosen after seeing what the earlier ones released (Feldman & Zrnic 2021;
    conversion: Canonne, Kamath & Steinke 2020, proposition 12). The order is fixed by the caps alone: the one that
    admits the most Gaussian releases.

    Raises
    ------
    PrivacyError
        If no order leaves a budget.
    """
    _check_promise(epsilon, delta)
    budgets = {a: epsilon - math.log1p(-1 / a) + math.log(delta * a) / (a - 1) for a in _ORDERS}
    order = max(budgets, key=lambda a: budgets[a] / a)
    if budgets[order] <= 0:
        raise PrivacyError(f"epsilon={epsilon:g}, delta={delta:g} leave nothing to a Renyi filter; use larger caps")
    return order, budgets[order]


def renyi_cost(mechanisms: Iterable[Mechanism], order: int) -> float:
    """Renyi divergence of all ``mechanisms`` composed, at ``order``."""
    return sum(mechanism.renyi(order) for mechanism in mechanisms)


def _solve(
    epsilon: float | None,
    delta: float | None,
    noise: float | None,
    main: Callable[[float], Mechanism],
    share: float,
    codes_per_unit: int,
    accounting: Accounting,
    guess: Callable[[float], float],
) -> _Solved:
    """Whichever of the three isn't given. ``guess`` maps the analytic Gaussian's sigma to where the search starts."""
    _require("profile_share", share, 0 < share < 1, "a number above 0 and below 1")
    _require("codes_per_unit", codes_per_unit, codes_per_unit >= 1, "at least 1")
    if noise is not None:
        accepted = f"a number of {_SMALLEST_NOISE:g} to {_LARGEST_NOISE:g}"
        _require("noise_multiplier", noise, _SMALLEST_NOISE <= noise <= _LARGEST_NOISE, accepted)
    if accounting == "paper":
        return _solve_split(epsilon, delta, noise, main, share, codes_per_unit, guess)
    if epsilon is not None and delta is not None:
        sigma = _analytic_sigma(epsilon, delta)
        profile = DiscreteGaussian(sigma * math.sqrt(codes_per_unit / share), codes_per_unit)
        if noise is None:
            start = guess(sigma / math.sqrt(1 - share))
            noise = _smallest_noise(lambda n: (main(n), profile), epsilon, delta, start)
        reached = joint_epsilon((main(noise), profile), delta)
        _check_kept(reached, epsilon, delta, noise)
        return _Solved(noise, profile, reached, delta)
    if noise is None or (epsilon is None and delta is None):
        raise PrivacyError("a plan: give two of epsilon, delta and noise_multiplier, and the third is solved")
    alone = (main(noise),)
    # The profile's share of mu^2 is told from the main mechanism alone, as there is no promise to take it from.
    if delta is not None:
        sigma = _analytic_sigma(max(joint_epsilon(alone, delta), 1e-6), delta)
    else:
        sigma = _analytic_sigma(_given(epsilon), joint_delta(alone, _given(epsilon)))
    profile = DiscreteGaussian(sigma * math.sqrt(codes_per_unit * (1 - share) / share), codes_per_unit)
    both = (main(noise), profile)
    if delta is not None:
        return _Solved(noise, profile, joint_epsilon(both, delta), delta)
    return _Solved(noise, profile, _given(epsilon), joint_delta(both, _given(epsilon)))


def _solve_split(
    epsilon: float | None,
    delta: float | None,
    noise: float | None,
    main: Callable[[float], Mechanism],
    share: float,
    codes_per_unit: int,
    guess: Callable[[float], float],
) -> _Solved:
    """The paper's way: the profile gets ``share`` of epsilon, the rest goes to the main part, and delta is halved."""
    if epsilon is None or delta is None:
        raise PrivacyError("accounting 'paper' splits an epsilon and a delta; give both")
    _check_promise(epsilon, delta)
    half, for_profile, for_main = delta / 2, share * epsilon, (1 - share) * epsilon
    start = _analytic_sigma(for_profile, half)

    def profile(multiplier: float) -> DiscreteGaussian:
        return DiscreteGaussian(multiplier * math.sqrt(codes_per_unit), codes_per_unit)

    profile_noise = _smallest_noise(lambda n: (profile(n),), for_profile, half, start)
    if noise is None:
        noise = _smallest_noise(lambda n: (main(n),), for_main, half, guess(_analytic_sigma(for_main, half)))
    reached = joint_epsilon((main(noise),), half) + joint_epsilon((profile(profile_noise),), half)
    _check_kept(reached, epsilon, delta, noise)
    return _Solved(noise, profile(profile_noise), reached, delta)


def _smallest_noise(
    mechanisms: Callable[[float], tuple[Mechanism, ...]], epsilon: float, delta: float, guess: float
) -> float:
    """Smallest noise (to a relative 1e-4) whose joint epsilon at `VERIFY_INTERVAL` is at most ``epsilon``."""

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
    while not keeps(high, VERIFY_INTERVAL):
        high *= 1 + _TOLERANCE
    return high


def _composed(mechanisms: Iterable[Mechanism], interval: float) -> pld.PrivacyLossDistribution:
    losses = [mechanism.loss(interval) for mechanism in mechanisms]
    if not losses:
        raise PrivacyError("composition: no mechanisms; at least one is needed")
    return reduce(lambda total, loss: total.compose(loss), losses)


def _analytic_sigma(epsilon: float, delta: float) -> float:
    """Scale of the one Gaussian of sensitivity 1 that costs exactly (epsilon, delta) (Balle & Wang 2018)."""
    _check_promise(epsilon, delta)
    return float(gaussian_mechanism.get_sigma_gaussian(epsilon, delta))


def _given(value: float | None) -> float:
    if value is None:
        raise PrivacyError("a plan: give two of epsilon, delta and noise_multiplier, and the third is solved")
    return value


def _check_promise(epsilon: float, delta: float) -> None:
    _require("epsilon", epsilon, math.isfinite(epsilon) and epsilon > 0, "a finite number above 0")
    _require("delta", delta, 0 < delta < 1, "a number above 0 and below 1")


def _check_kept(reached: float, epsilon: float, delta: float, noise: float) -> None:
    if reached > epsilon:
        raise PrivacyError(
            f"noise_multiplier is {noise:g}, which costs epsilon {reached:.4g} at delta {delta:g}; at most {epsilon:g} "
            "was promised, so more noise is accepted"
        )


def _require(name: str, value: float, holds: bool, accepted: str) -> None:
    if not holds:
        raise PrivacyError(f"{name} is {value!r}; {accepted} is accepted")
