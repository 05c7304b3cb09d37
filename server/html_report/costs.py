"""What sites' releases cost as the study goes on: the accountant's figures at a handful of rounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from common.errors import PrivacyError
from common.privacy.accounting import (
    SEARCH_INTERVAL,
    Mechanism,
    PrivacyPlan,
    StrongPlan,
    joint_epsilon,
)
from server.html_report.material import Material
from server.html_report.site_charts import CostLine
from server.html_report.words import count, several
from server.summary import SiteSummary

LINES = 4
"""Kinds of sites drawn: strong ones of the most common size classes, and the weak ones."""

_POINTS = 7
"""Rounds at which epsilon is worked out, for each kind."""


def cost_lines(material: Material) -> list[CostLine]:
    """What a site of each kind has cost after each round, if it answered them all, and after the vote."""
    kinds: dict[tuple[str, int], list[SiteSummary]] = defaultdict(list)
    for site in material.summary.sites:
        if site.epsilon is not None:
            # A weak site's cost doesn't depend on its size.
            kinds[site.tier, site.size_class if site.tier == "strong" else 0].append(site)
    strong = sorted((k for k in kinds if k[0] == "strong"), key=lambda k: (-len(kinds[k]), k))
    chosen = strong[: LINES - 1] + [k for k in kinds if k[0] == "weak"]
    lines = []
    for tier, size_class in chosen:
        sites = kinds[tier, size_class]
        plan = material.plan(sites[0])
        if plan is None:
            continue
        of = several(len(sites), "site")
        words = f"strong, size class {count(size_class)} ({of})" if tier == "strong" else f"weak ({of})"
        who = f"a strong site of size class {count(size_class)}" if tier == "strong" else "a weak site"
        lines.append(CostLine(words, who, _points(plan, material)))
    return lines


def released_epsilon(material: Material, site: SiteSummary) -> float | None:
    """What the answers that a site has given cost by themselves; None if that isn't known."""
    plan = material.plan(site)
    if plan is None:
        return None
    if not site.answers:
        return 0.0
    if not isinstance(plan, StrongPlan):
        return plan.epsilon
    return _after(plan, min(site.answers, material.study.training.rounds), material.study.training.steps)


def _points(plan: PrivacyPlan, material: Material) -> list[tuple[int, float]]:
    rounds = material.study.training.rounds
    if not isinstance(plan, StrongPlan):
        # All at once, after the last round: it was asked once.
        return [(rounds, 0.0), (rounds + 1, plan.epsilon)]
    at = sorted({int(r) for r in np.linspace(1, rounds, _POINTS).round()})
    return [(0, 0.0), *((r, _after(plan, r, material.study.training.steps)) for r in at)]


@lru_cache(maxsize=1024)
def _after(plan: StrongPlan, rounds: int, steps: int) -> float:
    """Epsilon of the profile and rounds of so many steps, at the plan's delta; coarse, and never too small."""
    if rounds * steps == plan.training.steps:
        return plan.epsilon
    training = replace(plan.training, steps=rounds * steps)
    parts: Sequence[Sequence[Mechanism]] = [(training, plan.profile)]
    delta = plan.delta
    if plan.accounting == "paper":
        # The paper's way halves delta and adds.
        parts, delta = [(training,), (plan.profile,)], plan.delta / 2
    try:
        return min(plan.epsilon, sum(joint_epsilon(part, delta, SEARCH_INTERVAL) for part in parts))
    except PrivacyError:
        return plan.epsilon
