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
    SubsampledGaussian,
    joint_epsilon,
    plan_strong,
    plan_weak,
)

STRONG = {"sample_rate": 0.064, "steps": 47, "profile_share": 0.02, "codes_per_unit": 1}


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


def test_opacus_prv_agrees() -> None:
    """A second accountant, by other authors, on the training part."""
    from opacus.accountants import PRVAccountant

    mechanism = SubsampledGaussian(0.9, 0.05, 100)
    prv = PRVAccountant()
    prv.history = [(0.9, 0.05, 100)]
    assert prv.get_epsilon(delta=1e-4) == pytest.approx(joint_epsilon((mechanism,), 1e-4), abs=0.02)


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
