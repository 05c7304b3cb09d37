"""What a report is made of, read from the folder of a finished run. All of it is public or already noised."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from common.errors import CheckpointError, DataError, FedcorpusError
from common.privacy.accounting import PrivacyPlan
from common.site.plan import site_plan, weak_plan
from common.study import Study
from server.aggregate import sum_profiles
from server.checkpoint import read_checkpoint
from server.corpus import read_ballots, read_pool, read_profiles
from server.progress import ProgressReader
from server.quality import Quality, read_quality
from server.sizes import noise_of_voters, units_of_voters
from server.summary import SiteSummary, Summary, read_summary
from server.workspace import Workspace

Counts = NDArray[np.int64]
Reals = NDArray[np.float64]


@dataclass(frozen=True)
class Material:
    """A finished run.

    Attributes
    ----------
    profiles, ballots
        Noisy ones by site, int64 ``(codes,)`` and ``(candidates,)``.
    pool_codes
        Code index of each candidate, int32 ``(candidates,)``.
    adapter
        Shape of each array of the adapter; empty if it isn't known.
    started
        When the run was first started, in seconds since 1970; None if that isn't known.
    """

    workspace: Workspace
    study: Study
    summary: Summary
    profiles: Mapping[str, Counts]
    ballots: Mapping[str, Counts]
    pool_codes: NDArray[np.int32]
    adapter: Mapping[str, tuple[int, ...]]
    quality: Quality | None
    started: float | None

    @cached_property
    def _plans(self) -> dict[tuple[str, int], PrivacyPlan | None]:
        """By tier and size class, of which many sites may each have its own: solving for noise takes long."""
        plans: dict[tuple[str, int], PrivacyPlan | None] = {}
        for site in self.summary.sites:
            kind = site.tier, site.size_class
            if site.epsilon is not None and kind not in plans:
                try:
                    plans[kind] = site_plan(self.study, *kind)
                except FedcorpusError:
                    plans[kind] = None
        return plans

    def plan(self, site: SiteSummary) -> PrivacyPlan | None:
        """What the study asks of a site; None if it was asked for nothing, or its size class is none of the study's."""
        return None if site.epsilon is None else self._plans[site.tier, site.size_class]

    @cached_property
    def vote_noise(self) -> float:
        """Standard deviation of the noise on one candidate's votes, summed over the sites that voted."""
        return float(np.sqrt(len(self.ballots)) * weak_plan(self.study).votes.scale) if self.ballots else 0.0

    @cached_property
    def sizes(self) -> Counts:
        """Units of each code, by profiles and by votes where these tell sizes too: what quotas follow."""
        strong, voted = self._profiles_by_voting()
        parts = list(strong.values())
        if voted:
            parts.append(
                units_of_voters(self.study, self.pool_codes, list(voted.values()), list(self.ballots.values()))
            )
        return sum_profiles(parts) if parts else np.zeros(len(self.study.codes), dtype=np.int64)

    @cached_property
    def size_noise(self) -> Reals:
        """Standard deviation of the noise on each code's size, float64 ``(codes,)``."""
        strong, voted = self._profiles_by_voting()
        sites = {site.name: site for site in self.summary.sites}
        plans = [self.plan(sites[name]) for name in strong if name in sites]
        scales = [plan.profile.scale for plan in plans if plan is not None]
        variance = np.full(len(self.study.codes), float(np.square(scales).sum()))
        if voted:
            variance += noise_of_voters(self.study, self.pool_codes, len(voted)) ** 2
        return np.asarray(np.sqrt(variance))

    def _profiles_by_voting(self) -> tuple[dict[str, Counts], dict[str, Counts]]:
        voted = {name: profile for name, profile in self.profiles.items() if name in self.ballots}
        return {name: profile for name, profile in self.profiles.items() if name not in voted}, voted


def read_material(workspace: Workspace) -> Material:
    """Read a finished run.

    Raises
    ------
    DataError
        If the folder holds no finished run, or its files don't belong together.
    """
    try:
        summary = read_summary(workspace)
        canonical = workspace.study.read_bytes()
        study = Study.from_canonical(canonical.decode())
    except (OSError, ValueError) as cause:
        raise DataError(
            f"{workspace.root}: no run that has finished; a folder with study.json and summary.json is needed"
        ) from cause
    if hashlib.sha256(canonical).hexdigest() != summary.study_sha256:
        raise DataError(f"{workspace.root}: study.json isn't the study of summary.json; the folder was changed")
    pool = read_pool(workspace.pool)
    ballots = read_ballots(workspace.ballots)
    if any(ballot.shape != (len(pool),) for ballot in ballots.values()):
        raise DataError(f"{workspace.ballots}: not ballots on the {len(pool)} candidates of {workspace.pool.name}")
    if len(pool) and not (pool.codes.min() >= 0 and pool.codes.max() < len(study.codes)):
        raise DataError(f"{workspace.pool}: a candidate has a code that the study doesn't declare")
    return Material(
        workspace=workspace,
        study=study,
        summary=summary,
        profiles=read_profiles(workspace.profiles),
        ballots=ballots,
        pool_codes=pool.codes,
        adapter=_adapter(workspace, study),
        quality=read_quality(workspace),
        started=_started(workspace),
    )


def _adapter(workspace: Workspace, study: Study) -> dict[str, tuple[int, ...]]:
    try:
        return {name: array.shape for name, array in read_checkpoint(workspace, study).adapter.items()}
    except CheckpointError:
        # Only how large the answers were is lost with it.
        return {}


def _started(workspace: Workspace) -> float | None:
    try:
        events = ProgressReader(workspace.progress).new_events()
        return float(events[0]["at"]) if events else None
    except (OSError, ValueError, LookupError, TypeError):
        return None
