"""Accounting: what is claimed is what is composed, and joint accounting beats adding epsilons."""

from __future__ import annotations

import math

import pytest
from dp_accounting import gaussian_mechanism
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import PrivacyError
from common.privacy.accounting import (
    DiscreteGaussian,
    PrivacyPlan,
    SubsampledGaussian,
    describe,
    described,
    joint_epsilon,
    plan_strong,
    plan_weak,
    renyi_budget,
    renyi_cost,
)

STRONG = {"sample_rate": 0.064, "steps": 47, "profile_share": 0.02, "codes_per_unit": 1}
WEAK = {"votes_per_unit": 8, "profile_share": 0.02, "codes_per_unit": 1}


@pytest.mark.parametrize(("epsilon", "noise"), [(1.0, 1.683), (4.0, 0.8141), (8.0, 0.6072)])
def test_training_noise_equals_the_frozen_table_within_a_profile(epsilon: float, noise: float) -> None:
    """n=1000, B=64, 3 epochs, delta=1/(n ln n), training alone; the 2 % profile may add at most 1.5 %."""
    delta = 1 / (1000 * math.log(1000))
    plan = plan_strong(epsilon, delta, **STRONG)
    assert noise * 0.999 <= plan.training.noise_multiplier <= noise * 1.015


@settings(max_examples=15, deadline=None)
@given(
    epsilon=st.floats(0.5, 10),
    delta=st.sampled_from([1e-3, 1e-4, 1e-5]),
    votes=st.integers(1, 16),
    codes=st.integers(1, 3),
    share=st.sampled_from([0.01, 0.02, 0.1]),
)
def test_a_weak_plan_never_exceeds_its_promise_and_is_tight(
    epsilon: float, delta: float, votes: int, codes: int, share: float
) -> None:
    plan = plan_weak(epsilon, delta, votes_per_unit=votes, profile_share=share, codes_per_unit=codes)
    recomputed = joint_epsilon(plan.mechanisms, delta)
    assert recomputed == pytest.approx(plan.epsilon)
    assert plan.epsilon <= epsilon
    less_noise = DiscreteGaussian(plan.votes.scale * 0.99, votes)
    assert joint_epsilon((less_noise, plan.profile), delta) > epsilon * 0.98


def test_a_strong_plan_never_exceeds_its_promise_and_less_noise_would() -> None:
    plan = plan_strong(4.0, 1e-4, **STRONG)
    assert 3.95 < joint_epsilon(plan.mechanisms, 1e-4) <= 4.0
    weaker = SubsampledGaussian(plan.training.noise_multiplier * 0.95, 0.064, 47)
    assert joint_epsilon((weaker, plan.profile), 1e-4) > 4.0


def test_forgetting_the_square_root_of_k_breaks_the_promise() -> None:
    """Twin: noise for sensitivity 1 under K=8 votes."""
    forgotten = DiscreteGaussian(gaussian_mechanism.get_sigma_gaussian(4.0, 1e-4), 8)
    assert joint_epsilon((forgotten,), 1e-4) > 10


def test_the_profile_is_nearly_free() -> None:
    with_profile = plan_strong(4.0, 1e-4, **STRONG).training.noise_multiplier
    almost_none = plan_strong(4.0, 1e-4, **{**STRONG, "profile_share": 1e-6}).training.noise_multiplier
    assert with_profile / almost_none < 1.02


FROZEN = [  # units, batch, epochs, noise multiplier, epsilon at delta = 1 / units: PLD and RDP
    (1000, 64, 3, 1.0, 1.9805, 2.493),
    (2250, 64, 3, 0.8, 2.3334, 2.995),
    (15000, 256, 5, 0.7, 3.9379, 4.803),
    (15000, 64, 5, 0.6, 3.2357, 4.164),
    (1000, 256, 5, 2.0, 1.8752, 2.208),
]


@pytest.mark.parametrize(("units", "batch", "epochs", "noise", "by_pld", "by_rdp"), FROZEN)
def test_accountants_agree_with_a_frozen_table_and_with_each_other(
    units: int, batch: int, epochs: int, noise: float, by_pld: float, by_rdp: float
) -> None:
    from opacus.accountants import PRVAccountant, RDPAccountant

    mechanism = SubsampledGaussian(noise, batch / units, math.ceil(epochs * units / batch))
    epsilon = joint_epsilon((mechanism,), 1 / units)
    assert epsilon == pytest.approx(by_pld, abs=2e-4)
    opacus = {}
    for accountant in (PRVAccountant(), RDPAccountant()):
        accountant.history = [(mechanism.noise_multiplier, mechanism.sample_rate, mechanism.steps)]
        opacus[accountant.mechanism()] = accountant.get_epsilon(delta=1 / units)
    assert epsilon < opacus["prv"] < epsilon + 0.02
    assert opacus["rdp"] == pytest.approx(by_rdp, abs=2e-3)
    assert opacus["rdp"] > epsilon


def test_the_central_limit_approximation_would_report_too_little() -> None:
    """Twin: why it is never used."""
    from opacus.accountants import GaussianAccountant

    mechanism = SubsampledGaussian(1.0, 0.064, 47)
    gdp = GaussianAccountant()
    gdp.history = [(1.0, 0.064, 47)]
    assert gdp.get_epsilon(delta=1e-3) < 0.85 * joint_epsilon((mechanism,), 1e-3)


@pytest.mark.parametrize("tier", ["strong", "weak"])
def test_two_of_epsilon_delta_and_noise_give_the_third(tier: str) -> None:
    def plan(epsilon: float | None, delta: float | None, noise: float | None = None) -> PrivacyPlan:
        shared = {"profile_share": 0.02, "codes_per_unit": 1, "noise_multiplier": noise}
        if tier == "strong":
            return plan_strong(epsilon, delta, sample_rate=0.064, steps=47, **shared)
        return plan_weak(epsilon, delta, votes_per_unit=8, **shared)

    solved = plan(4.0, 1e-4)
    main = solved.mechanisms[0]
    noise = main.scale / math.sqrt(8) if isinstance(main, DiscreteGaussian) else main.noise_multiplier
    assert plan(4.0, 1e-4, noise) == solved
    assert plan(None, 1e-4, noise).epsilon == pytest.approx(4.0, rel=2e-3)
    assert plan(4.0, None, noise).delta == pytest.approx(1e-4, rel=0.03)
    for made in (plan(None, 1e-4, noise), plan(4.0, None, noise)):
        assert joint_epsilon(made.mechanisms, made.delta) <= made.epsilon * (1 + 1e-9)
        assert made.profile.scale == pytest.approx(solved.profile.scale, rel=0.02)
    with pytest.raises(PrivacyError, match=r"costs epsilon 4.*at most 4 was promised"):
        plan(4.0, 1e-4, noise * 0.99)
    for given_ in ((None, None, noise), (4.0, None, None), (None, 1e-4, None)):
        with pytest.raises(PrivacyError, match="give two"):
            plan(*given_)


@pytest.mark.parametrize("epsilon", [1.0, 4.0, 8.0])
def test_the_papers_split_keeps_the_promise_and_needs_more_noise(epsilon: float) -> None:
    both = {"profile_share": 0.05, "codes_per_unit": 1, "accounting": "paper"}
    strong, weak = plan_strong(epsilon, 1e-4, **STRONG), plan_weak(epsilon, 1e-4, **WEAK)
    paper_strong = plan_strong(epsilon, 1e-4, **{**STRONG, **both})
    paper_weak = plan_weak(epsilon, 1e-4, **{**WEAK, **both})
    for paper in (paper_strong, paper_weak):
        main, profile = (joint_epsilon((m,), 5e-5) for m in paper.mechanisms)
        assert paper.epsilon == pytest.approx(main + profile)
        assert 0.99 * epsilon < paper.epsilon <= epsilon
        assert profile == pytest.approx(0.05 * epsilon, rel=0.02)
        assert joint_epsilon(paper.mechanisms, 1e-4) < paper.epsilon, "composed at once it costs less"
    assert 0.03 < 1 - strong.training.noise_multiplier / paper_strong.training.noise_multiplier < 0.2
    assert 0.03 < 1 - weak.votes.scale / paper_weak.votes.scale < 0.2


def test_the_papers_split_needs_both_an_epsilon_and_a_delta() -> None:
    with pytest.raises(PrivacyError, match="give both"):
        plan_weak(None, 1e-4, **{**WEAK, "noise_multiplier": 1.0, "accounting": "paper"})


@pytest.mark.parametrize("noise", [0.0, -1.0, 0.01, math.nan, math.inf])
def test_a_noise_that_cannot_be_accounted_for_is_refused(noise: float) -> None:
    with pytest.raises(PrivacyError, match="noise_multiplier is"):
        plan_weak(None, 1e-4, **WEAK, noise_multiplier=noise)


@pytest.mark.parametrize("order", [2, 3, 7, 40])
def test_renyi_divergence_equals_another_implementations(order: int) -> None:
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    mechanism = SubsampledGaussian(0.9, 0.05, 100)
    accountant = RdpAccountant([order])
    accountant.compose(dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(0.9)), 100)
    expected = accountant.get_epsilon(1e-4) - math.log1p(-1 / order) + math.log(1e-4 * order) / (order - 1)
    assert mechanism.renyi(order) == pytest.approx(expected, rel=1e-6)
    assert SubsampledGaussian(2.0, 1.0, 3).renyi(order) == pytest.approx(3 * order / 8)
    assert DiscreteGaussian(2.0, 3).renyi(order) == pytest.approx(3 * order / 8)


@given(st.floats(0.3, 30), st.sampled_from([1e-3, 1e-5, 1e-7]), st.integers(1, 30))
@settings(deadline=None, max_examples=60)
def test_a_full_renyi_budget_is_within_its_caps(epsilon: float, delta: float, studies: int) -> None:
    """Gaussians that use a budget up exactly, composed in closed form, cost no more than the caps."""
    order, budget = renyi_budget(epsilon, delta)
    mu_squared = 2 * budget / order
    assert gaussian_mechanism.get_epsilon_gaussian(1 / math.sqrt(mu_squared), delta) <= epsilon
    scale = math.sqrt(studies / mu_squared)
    assert renyi_cost([DiscreteGaussian(scale, 1)] * studies, order) == pytest.approx(budget)


def test_a_mechanism_comes_back_from_its_description() -> None:
    for mechanism in (SubsampledGaussian(0.9, 0.05, 100), DiscreteGaussian(2.0, 3)):
        assert described(describe(mechanism)) == mechanism
    for wrong in ({}, {"mechanism": "laplace"}, {"mechanism": "discrete-gaussian", "scale": 1.0}, {"mechanism": []}):
        with pytest.raises(PrivacyError, match="mechanism is"):
            described(wrong)


@pytest.mark.parametrize(
    ("epsilon", "delta", "name"),
    [
        (0.0, 1e-4, "epsilon"),
        (-1.0, 1e-4, "epsilon"),
        (math.inf, 1e-4, "epsilon"),
        (1.0, 0.0, "delta"),
        (1.0, 1.0, "delta"),
    ],
)
def test_a_promise_without_meaning_is_refused_by_name(epsilon: float, delta: float, name: str) -> None:
    with pytest.raises(PrivacyError, match=f"{name} is .* accepted"):
        plan_weak(epsilon, delta, votes_per_unit=1, profile_share=0.02, codes_per_unit=1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SubsampledGaussian(0.0, 0.1, 1),
        lambda: SubsampledGaussian(1.0, 1.1, 1),
        lambda: SubsampledGaussian(1.0, 0.1, 0),
        lambda: DiscreteGaussian(-1.0, 1),
        lambda: DiscreteGaussian(1.0, 0),
        lambda: joint_epsilon((), 1e-4),
    ],
)
def test_a_mechanism_without_meaning_is_refused(make: object) -> None:
    with pytest.raises(PrivacyError):
        make()  # type: ignore[operator]
