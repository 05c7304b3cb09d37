"""What joint accounting buys, against adding up the parts' epsilons and deltas: less noise, or a smaller epsilon."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from common.privacy.accounting import Accounting, StrongPlan, WeakPlan, joint_epsilon, plan_strong, plan_weak
from tests.benchmarks.bars import Bar

DELTA = 1e-4
SHARES: dict[Accounting, float] = {"joint": 0.02, "paper": 0.05}
"""What the profile takes: of mu^2, and of epsilon. Both are the study's defaults."""

Planned = Callable[[float, Accounting], StrongPlan | WeakPlan]


def run() -> Iterable[Bar]:
    """Compare the paper's split with one joint promise, for both tiers, and what a profile gets out of it.

    ``composes to`` is the epsilon that the paper's parts have together; ``as noisy at`` the one at which a joint
    promise has the noise that the paper's way needs for its own.
    """
    print(
        f"{'tier':8}{'epsilon':>8}{'split':>10}{'joint':>10}{'saved':>8}{'profile noise':>18}"
        f"{'composes to':>13}{'as noisy at':>13}"
    )
    worst = 1.0
    for epsilon in (1.0, 4.0, 8.0):
        for tier, plan in (("strong", _strong), ("weak", _weak)):
            split, joint = plan(epsilon, "paper"), plan(epsilon, "joint")
            saved = 1 - _noise(joint) / _noise(split)
            worst = min(worst, saved)
            profiles = f"{split.profile.scale:.1f} -> {joint.profile.scale:.1f}"
            composed = joint_epsilon(split.mechanisms, split.delta)
            print(
                f"{tier:8}{epsilon:8g}{_noise(split):10.4f}{_noise(joint):10.4f}{saved:8.1%}{profiles:>18}"
                f"{composed:13.2f}{_as_noisy(plan, _noise(split), epsilon):13.2f}"
            )
    yield Bar("joint-accounting-saving", worst, 0.02, at_least=True)


def _as_noisy(plan: Planned, noise: float, epsilon: float) -> float:
    """Epsilon of the joint promise that adds so much noise; it is no more than the paper's."""
    low, high = epsilon / 4, epsilon
    while high - low > 0.005 * epsilon:
        middle = (low + high) / 2
        low, high = (middle, high) if _noise(plan(middle, "joint")) > noise else (low, middle)
    return high


def _noise(plan: StrongPlan | WeakPlan) -> float:
    return plan.training.noise_multiplier if isinstance(plan, StrongPlan) else plan.votes.scale


def _strong(epsilon: float, accounting: Accounting) -> StrongPlan:
    return plan_strong(
        epsilon,
        DELTA,
        sample_rate=0.064,
        steps=47,
        profile_share=SHARES[accounting],
        codes_per_unit=1,
        accounting=accounting,
    )


def _weak(epsilon: float, accounting: Accounting) -> WeakPlan:
    return plan_weak(
        epsilon,
        DELTA,
        votes_per_unit=8,
        profile_share=SHARES[accounting],
        codes_per_unit=1,
        accounting=accounting,
    )
