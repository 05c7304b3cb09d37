"""From a study to one site's privacy plan. Site and coordinator compute it alike, from public numbers only."""

from __future__ import annotations

from functools import lru_cache

from common.errors import StudyError
from common.privacy.accounting import PrivacyPlan, StrongPlan, WeakPlan, plan_strong, plan_weak
from common.study import Study


def site_plan(study: Study, tier: str, size_class: int) -> PrivacyPlan:
    """The noise and the cost of everything ``study`` releases from a site of this tier and size class.

    Raises
    ------
    StudyError
        If the size class is below the study's minimum (the sample rate could exceed 1).
    """
    return strong_plan(study, size_class) if tier == "strong" else weak_plan(study)


def strong_plan(study: Study, size_class: int) -> StrongPlan:
    """Plan of a strong site: R x E steps at q = B / size class, and one profile."""
    minimum = study.federation.min_documents
    if size_class < minimum:
        raise StudyError(f"size class is {size_class}; study {study.name!r} accepts at least {minimum}")
    return _strong(
        study.privacy.epsilon,
        study.privacy.delta,
        sample_rate(study, size_class),
        study.training.rounds * study.training.steps,
        study.privacy.profile_share,
        study.privacy.codes_per_unit,
    )


def weak_plan(study: Study) -> WeakPlan:
    """Plan of a weak site: one profile and one ballot of K votes per unit."""
    return _weak(
        study.privacy.epsilon,
        study.privacy.delta,
        study.neighbours,
        study.privacy.profile_share,
        study.privacy.codes_per_unit,
    )


def sample_rate(study: Study, size_class: int) -> float:
    """q: probability that a unit is in a batch. Public: the exact number of units never enters."""
    return study.training.batch_size / size_class


@lru_cache(maxsize=64)
def _strong(
    epsilon: float, delta: float, rate: float, steps: int, profile_share: float, codes_per_unit: int
) -> StrongPlan:
    return plan_strong(
        epsilon,
        delta,
        sample_rate=rate,
        steps=steps,
        profile_share=profile_share,
        codes_per_unit=codes_per_unit,
    )


@lru_cache(maxsize=64)
def _weak(epsilon: float, delta: float, votes: int, profile_share: float, codes_per_unit: int) -> WeakPlan:
    return plan_weak(epsilon, delta, votes_per_unit=votes, profile_share=profile_share, codes_per_unit=codes_per_unit)
