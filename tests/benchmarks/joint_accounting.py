"""What joint accounting buys: noise at the same (epsilon, delta), against adding up the parts' epsilons and deltas."""

from __future__ import annotations

from collections.abc import Iterable

from common.privacy.accounting import plan_strong, plan_weak
from tests.benchmarks.bars import Bar

DELTA = 1e-4
PAPER_PROFILE_SHARE = 0.05
"""Share of epsilon (and of delta) that a split budget gives to the profile."""


def run() -> Iterable[Bar]:
    """Compare a 5 % split with one joint promise, for both tiers."""
    print(f"{'tier':8}{'epsilon':>8}{'split':>10}{'joint':>10}{'saved':>8}")
    worst = 1.0
    for epsilon in (1.0, 4.0, 8.0):
        for tier, noise in (("strong", _strong), ("weak", _weak)):
            # The split's part alone: next to nothing of its budget is left to a profile.
            split = noise(epsilon * (1 - PAPER_PROFILE_SHARE), DELTA / 2, 1e-9)
            joint = noise(epsilon, DELTA, 0.02)
            worst = min(worst, 1 - joint / split)
            print(f"{tier:8}{epsilon:8g}{split:10.4f}{joint:10.4f}{1 - joint / split:8.1%}")
    yield Bar("joint-accounting-saving", worst, 0.02, at_least=True)


def _strong(epsilon: float, delta: float, share: float) -> float:
    plan = plan_strong(epsilon, delta, sample_rate=0.064, steps=47, profile_share=share, codes_per_unit=1)
    return plan.training.noise_multiplier


def _weak(epsilon: float, delta: float, share: float) -> float:
    return plan_weak(epsilon, delta, votes_per_unit=8, profile_share=share, codes_per_unit=1).votes.scale
