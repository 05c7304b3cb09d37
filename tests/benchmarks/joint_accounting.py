"""What joint accounting buys: noise at the same (epsilon, delta), against adding up the parts' epsilons and deltas."""

from __future__ import annotations

from collections.abc import Iterable

from common.privacy.accounting import Accounting, plan_strong, plan_weak
from tests.benchmarks.bars import Bar

DELTA = 1e-4
SHARES: dict[Accounting, float] = {"joint": 0.02, "paper": 0.05}
"""What the profile takes: of mu^2, and of epsilon. Both are the study's defaults."""


def run() -> Iterable[Bar]:
    """Compare the paper's split with one joint promise, for both tiers, and what a profile gets out of it."""
    print(f"{'tier':8}{'epsilon':>8}{'split':>10}{'joint':>10}{'saved':>8}{'profile noise':>18}")
    worst = 1.0
    for epsilon in (1.0, 4.0, 8.0):
        for tier, plan in (("strong", _strong), ("weak", _weak)):
            split, split_profile = plan(epsilon, "paper")
            joint, joint_profile = plan(epsilon, "joint")
            worst = min(worst, 1 - joint / split)
            profiles = f"{split_profile:.1f} -> {joint_profile:.1f}"
            print(f"{tier:8}{epsilon:8g}{split:10.4f}{joint:10.4f}{1 - joint / split:8.1%}{profiles:>18}")
    yield Bar("joint-accounting-saving", worst, 0.02, at_least=True)


def _strong(epsilon: float, accounting: Accounting) -> tuple[float, float]:
    plan = plan_strong(
        epsilon,
        DELTA,
        sample_rate=0.064,
        steps=47,
        profile_share=SHARES[accounting],
        codes_per_unit=1,
        accounting=accounting,
    )
    return plan.training.noise_multiplier, plan.profile.scale


def _weak(epsilon: float, accounting: Accounting) -> tuple[float, float]:
    plan = plan_weak(
        epsilon,
        DELTA,
        votes_per_unit=8,
        profile_share=SHARES[accounting],
        codes_per_unit=1,
        accounting=accounting,
    )
    return plan.votes.scale, plan.profile.scale
