"""From a study to one site's privacy plan. Site and coordinator compute it alike, from public numbers only."""

from __future__ import annotations

from functools import lru_cache

from common.errors import StudyError
from common.privacy.accounting import PrivacyPlan, StrongPlan, WeakPlan, plan_strong, plan_weak, with_steps
from common.study import Privacy, Study


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
    return _strong(study.privacy, sample_rate(study, size_class), study.training.rounds * study.training.steps)


def weak_plan(study: Study) -> WeakPlan:
    """Plan of a weak site: one profile and one ballot of R votes per unit."""
    return _weak(study.privacy, study.votes_per_unit)


def saved_by_joint_accounting(study: Study, size_class: int) -> dict[str, float]:
    """Share of the training noise (``strong``), vote noise (``weak``) and profile noise that one joint promise saves.

    Both ways keep the same (epsilon, delta), the one that the study's own plan of that tier reaches or promises.
    """
    saved = {}
    for tier in ("strong", "weak"):
        plan = site_plan(study, tier, size_class)
        promise = {
            "epsilon": study.privacy.epsilon or plan.epsilon,
            "delta": study.privacy.delta or plan.delta,
            "training_noise_multiplier": None,
            "vote_noise_multiplier": None,
        }
        joint, paper = (
            site_plan(
                study.model_copy(
                    update={"privacy": study.privacy.model_copy(update={**promise, "accounting": accounting})}
                ),
                tier,
                size_class,
            )
            for accounting in ("joint", "paper")
        )
        saved[tier] = 1 - _noise(joint) / _noise(paper)
        saved["profile"] = 1 - joint.profile.scale / paper.profile.scale
    return saved


def _noise(plan: PrivacyPlan) -> float:
    return plan.training.noise_multiplier if isinstance(plan, StrongPlan) else plan.votes.scale


def remaining_plan(plan: PrivacyPlan, study: Study, first_round: int) -> PrivacyPlan:
    """The part of a plan that is left for a site which joins in ``first_round``: the same noise, fewer steps.

    That it joins late is fixed before it has released anything, so what is left is a plan like any other.
    """
    if first_round == 1 or not isinstance(plan, StrongPlan):
        return plan
    return with_steps(plan, (study.training.rounds - first_round + 1) * study.training.steps)


def sample_rate(study: Study, size_class: int) -> float:
    """q: probability that a unit is in a batch. Public: the exact number of units never enters."""
    return study.training.batch_size / size_class


@lru_cache(maxsize=64)
def _strong(privacy: Privacy, rate: float, steps: int) -> StrongPlan:
    return plan_strong(
        privacy.epsilon,
        privacy.delta,
        sample_rate=rate,
        steps=steps,
        profile_share=_profile_share(privacy),
        codes_per_unit=privacy.codes_per_unit,
        noise_multiplier=privacy.training_noise_multiplier,
        accounting=privacy.accounting,
    )


@lru_cache(maxsize=64)
def _weak(privacy: Privacy, votes_per_unit: int) -> WeakPlan:
    return plan_weak(
        privacy.epsilon,
        privacy.delta,
        votes_per_unit=votes_per_unit,
        profile_share=_profile_share(privacy),
        codes_per_unit=privacy.codes_per_unit,
        noise_multiplier=privacy.vote_noise_multiplier,
        accounting=privacy.accounting,
    )


def _profile_share(privacy: Privacy) -> float:
    return privacy.paper_profile_share if privacy.accounting == "paper" else privacy.profile_share
