"""What a study costs, before anything is touched: what ``fedcorpus plan`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from common.privacy.accounting import PrivacyPlan
from common.site.plan import saved_by_joint_accounting, strong_plan, weak_plan
from common.study import Study
from server.report import at_most


@dataclass(frozen=True)
class PlannedRelease:
    """One release of a site of a tier.

    Attributes
    ----------
    joint_epsilon, delta
        Of all that a site of this tier releases.
    """

    tier: str
    release: str
    noise: str
    joint_epsilon: float
    delta: float


@dataclass(frozen=True)
class Planned:
    """A study's costs.

    Attributes
    ----------
    saved
        Share of the noise that one joint promise saves against the paper's split, by tier and for profiles.
    signal
        A training step's signal over its noise, times the root of the number of trained weights, at most.
    """

    study: Study
    size_class: int
    releases: Sequence[PlannedRelease]
    saved: Mapping[str, float]
    signal: float

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "study": self.study.sha256,
            "accounting": self.study.privacy.accounting,
            "releases": [vars(release) for release in self.releases],
            "joint_saves": dict(self.saved),
            "step_signal_to_noise_times_root_of_weights": self.signal,
            "max_units": self.study.federation.max_units,
        }


def planned(study: Study, size_class: int | None = None) -> Planned:
    """Noise and joint epsilon of a site of each tier.

    Parameters
    ----------
    size_class
        Of a strong site; the study's minimum by default.

    Raises
    ------
    UserError
        If no noise keeps the promise.
    """
    size = size_class or study.federation.min_documents
    strong, weak = strong_plan(study, size), weak_plan(study)
    steps = f"{strong.training.steps} steps at q={strong.training.sample_rate:.4g}"
    rows: tuple[tuple[str, str, str, PrivacyPlan], ...] = (
        ("strong", steps, f"Gaussian, multiplier {strong.training.noise_multiplier:.4f}", strong),
        ("strong", "profile", f"discrete Gaussian, scale {strong.profile.scale:.3f}", strong),
        ("weak", f"ballot, R={weak.votes.cells_per_unit}", f"discrete Gaussian, scale {weak.votes.scale:.3f}", weak),
        ("weak", "profile", f"discrete Gaussian, scale {weak.profile.scale:.3f}", weak),
    )
    return Planned(
        study,
        size,
        [PlannedRelease(tier, what, noise, plan.epsilon, plan.delta) for tier, what, noise, plan in rows],
        saved_by_joint_accounting(study, size),
        study.training.batch_size / strong.training.noise_multiplier,
    )


def rendered(found: Planned) -> RenderableType:
    """For people."""
    study = found.study
    title = f"Study {study.name}: what each site would release (size class {found.size_class})"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("tier", "release", "noise", "ε of all", "δ"):
        table.add_column(heading)
    for row in found.releases:
        table.add_row(row.tier, row.release, row.noise, at_most(row.joint_epsilon), f"{row.delta:g}")
    own, saved = "this study" if study.privacy.accounting == "joint" else "not this study", found.saved
    words = (
        f"One promise for all of a site's releases ({own}) needs {saved['strong']:.1%} less training noise, "
        f"{saved['weak']:.1%} less vote noise\nand {saved['profile']:.0%} less profile noise than the paper's way, "
        f"which splits the same epsilon and delta\nand adds (profile: {study.privacy.paper_profile_share:.0%}).\n"
        f"A training step's signal is at most {found.signal:.3g}/√d of its noise, with d trained weights (a million: "
        f"{found.signal / 1000:.2g});\nover a round {study.training.steps**0.5:.3g} times that, and over n sites "
        "√n times.\n"
        f"A weak site counts for up to {study.federation.max_units:,} units, whether it has them or not "
        "(federation.max_units):\nset it near what the largest one has."
    )
    return Group(table, Text(words))
