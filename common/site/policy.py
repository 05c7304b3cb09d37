"""The hospital's own limits, checked before anything else. Fails closed; a server can only ask for less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.errors import BudgetExceededError, PolicyRefusal
from common.privacy.accounting import Mechanism, PrivacyPlan, renyi_budget, renyi_cost
from common.protocol import Request, TrainRequest, VoteRequest
from common.site.config import Policy, Site
from common.site.plan import site_plan
from common.study import Study


@dataclass(frozen=True)
class Charge:
    """What one earlier run was charged."""

    epsilon: float
    delta: float
    mechanisms: tuple[Mechanism, ...]


def check_study(site: Site, study: Study) -> PrivacyPlan:
    """Refuse a study that this site's policy doesn't allow; else say what it would cost, as computed here.

    Raises
    ------
    PolicyRefusal, BudgetExceededError
        With the rule, the value and the limit, for the operator.
    """
    policy = site.policy
    if not isinstance(policy.allowed_studies, str) and study.sha256 not in policy.allowed_studies:
        raise PolicyRefusal(
            f"policy.allowed_studies of site {site.name!r} doesn't list study {study.name!r} ({study.sha256}); add its "
            "hash after review"
        )
    if study.privacy.unit not in policy.allowed_units:
        raise PolicyRefusal(
            f"policy.allowed_units of site {site.name!r} is {list(policy.allowed_units)}; the study protects a "
            f"{study.privacy.unit!r}"
        )
    needed = max(study.federation.min_documents, policy.min_documents)
    if site.size_class < needed:
        raise PolicyRefusal(
            f"site {site.name!r} declares size class {site.size_class}; study {study.name!r} and the site's policy "
            f"together need at least {needed}"
        )
    # What the study states is looked at before its noise is solved, which takes seconds.
    _check_limits(site, study, study.privacy.epsilon, study.privacy.delta)
    plan = site_plan(study, site.tier, site.size_class)
    _check_limits(site, study, plan.epsilon, plan.delta)
    return plan


def check_request(site: Site, request: Request) -> None:
    """Refuse a request that this site's policy doesn't allow, whatever its study says.

    Raises
    ------
    PolicyRefusal
    """
    policy, kind = site.policy, request.key.partition("/")[0]
    if kind not in policy.allowed_requests:
        raise PolicyRefusal(
            f"policy.allowed_requests of site {site.name!r} is {list(policy.allowed_requests)}; {kind!r} was asked"
        )
    size = _size(request)
    if size > policy.max_request_bytes:
        raise PolicyRefusal(
            f"{request.key!r} carries {size} bytes; the policy of site {site.name!r} allows {policy.max_request_bytes}"
        )
    if isinstance(request, VoteRequest):
        _check_pool(site, request)


def check_lifetime(policy: Policy, earlier: Sequence[Charge], plan: PrivacyPlan) -> None:
    """Refuse a plan that would take the site past its lifetime caps.

    A later study's parameters may depend on an earlier one's outputs, so studies can't be composed as one plan: they
    are added up, or go through a Renyi filter, as the policy says.

    Raises
    ------
    BudgetExceededError
    """
    spent = sum(charge.epsilon for charge in earlier), sum(charge.delta for charge in earlier)
    needs = f"this run needs {plan.epsilon:.4g}, {plan.delta:.3g} more"
    caps = f"the lifetime caps are {policy.max_epsilon:g}, {policy.max_delta:g}"
    if policy.composition == "basic":
        if spent[0] + plan.epsilon > policy.max_epsilon or spent[1] + plan.delta > policy.max_delta:
            raise BudgetExceededError(f"ledger has spent epsilon {spent[0]:.4g}, delta {spent[1]:.3g}; {needs}; {caps}")
        return
    order, budget = renyi_budget(policy.max_epsilon, policy.max_delta)
    used, cost = sum(renyi_cost(charge.mechanisms, order) for charge in earlier), renyi_cost(plan.mechanisms, order)
    if used + cost > budget:
        raise BudgetExceededError(
            f"ledger has spent {used:.4g} of the Renyi budget {budget:.4g} at order {order}; this run needs "
            f"{cost:.4g} more; {caps}"
        )


def _check_limits(site: Site, study: Study, epsilon: float | None, delta: float | None) -> None:
    policy = site.policy
    for what, asked, for_life, for_one in (
        ("epsilon", epsilon, policy.max_epsilon, policy.max_epsilon_per_study),
        ("delta", delta, policy.max_delta, policy.max_delta_per_study),
    ):
        limit = for_life if for_one is None else min(for_life, for_one)
        if asked is not None and asked > limit:
            raise BudgetExceededError(
                f"study {study.name!r} asks for {what} {asked:g}; the policy of site {site.name!r} allows {limit:g} a "
                "study"
            )


def _check_pool(site: Site, request: VoteRequest) -> None:
    policy, pool = site.policy, request.pool
    if len(pool) > policy.max_candidates:
        raise PolicyRefusal(
            f"the pool has {len(pool)} candidates; the policy of site {site.name!r} allows {policy.max_candidates}"
        )
    longest = max(map(len, pool.texts), default=0)
    if longest > policy.max_candidate_characters:
        raise PolicyRefusal(
            f"a candidate of the pool has {longest} characters; the policy of site {site.name!r} allows "
            f"{policy.max_candidate_characters}"
        )
    counts = np.bincount(pool.codes, minlength=len(request.study.codes))
    few = np.flatnonzero((counts > 0) & (counts < policy.min_candidates_per_code))
    if few.size:
        raise PolicyRefusal(
            f"the pool has {counts[few[0]]} candidates under code {request.study.codes.label(int(few[0]))!r}; the "
            f"policy of site {site.name!r} needs at least {policy.min_candidates_per_code}"
        )


def _size(request: Request) -> int:
    if isinstance(request, TrainRequest):
        return sum(value.nbytes for value in request.adapter.values())
    if isinstance(request, VoteRequest):
        return sum(len(text.encode("utf-8", "surrogatepass")) for text in request.pool.texts)
    return 0
