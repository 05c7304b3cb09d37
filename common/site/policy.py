"""The hospital's own limits, checked before anything else. Fails closed; a server can only ask for less."""

from __future__ import annotations

from common.errors import BudgetExceededError, PolicyRefusal
from common.privacy.accounting import PrivacyPlan
from common.site.config import Policy, Site
from common.study import Study


def check_study(site: Site, study: Study) -> None:
    """Refuse a study that this site's policy doesn't allow.

    Raises
    ------
    PolicyRefusal, BudgetExceededError
        With the rule, the value and the limit, for the operator.
    """
    policy = site.policy
    if policy.allowed_studies != "any" and study.sha256 not in policy.allowed_studies:
        raise PolicyRefusal(
            f"policy.allowed_studies of site {site.name!r} doesn't list study {study.name!r} ({study.sha256}); add its "
            "hash after review"
        )
    if study.privacy.unit not in policy.allowed_units:
        raise PolicyRefusal(
            f"policy.allowed_units of site {site.name!r} is {list(policy.allowed_units)}; the study protects a "
            f"{study.privacy.unit!r}"
        )
    if site.size_class < study.federation.min_documents:
        raise PolicyRefusal(
            f"site {site.name!r} declares size class {site.size_class}; study {study.name!r} needs at least "
            f"{study.federation.min_documents}"
        )
    limit = _study_limit(policy)
    if study.privacy.epsilon > limit:
        raise BudgetExceededError(
            f"study {study.name!r} asks for epsilon {study.privacy.epsilon:g}; the policy of site {site.name!r} allows "
            f"{limit:g} a study"
        )
    if study.privacy.delta > policy.max_delta:
        raise BudgetExceededError(
            f"study {study.name!r} asks for delta {study.privacy.delta:g}; the policy of site {site.name!r} allows "
            f"{policy.max_delta:g}"
        )


def check_lifetime(policy: Policy, spent: tuple[float, float], plan: PrivacyPlan) -> None:
    """Refuse a plan that would take the site past its lifetime cap.

    Studies are composed by adding (basic composition): a later study's parameters may depend on an earlier one's
    outputs, so they can't be composed as one plan.

    Raises
    ------
    BudgetExceededError
    """
    epsilon, delta = spent[0] + plan.epsilon, spent[1] + plan.delta
    if epsilon <= policy.max_epsilon and delta <= policy.max_delta:
        return
    raise BudgetExceededError(
        f"ledger has spent epsilon {spent[0]:.4g}, delta {spent[1]:.3g}; this run needs {plan.epsilon:.4g}, "
        f"{plan.delta:.3g} more; the lifetime caps are {policy.max_epsilon:g}, {policy.max_delta:g}"
    )


def _study_limit(policy: Policy) -> float:
    if policy.max_epsilon_per_study is None:
        return policy.max_epsilon
    return min(policy.max_epsilon, policy.max_epsilon_per_study)
