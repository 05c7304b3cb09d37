"""Verification: does a corpus' privacy claim hold, by the sites' own ledgers and a second accountant?

What it needs is public: the run folder's study and summary, and the sites' exported ledgers, which hold every release
and no byte of one. Nothing of what the coordinator computed is believed: each chain is followed, each site's mechanisms
are compared with what the study asks of its tier and size class, and epsilon is computed anew by an accountant that
shares no code with the first one.

    verification = verify(Path("fedcorpus-runs/demo/run"), exports)
    verification.holds
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from common.errors import DataError, FedcorpusError, LedgerError
from common.privacy import second_opinion
from common.privacy.accounting import describe, described, joint_epsilon
from common.site.journal import FORMAT, Event, follow_chain
from common.site.plan import remaining_plan, site_plan
from common.study import Study
from server.summary import SiteSummary, Summary, read_summary
from server.workspace import Workspace

TOLERANCE = 1e-3
"""Two upper bounds of one epsilon differ by their discretisation; so much, relative or absolute, is allowed."""


_NOISE = ("noise_multiplier", "scale")


class SiteVerdict(BaseModel):
    """What one site's ledger says of its releases in the run."""

    model_config = ConfigDict(frozen=True)

    site: str = Field(description="Name of the site.")
    tier: str = Field(description="strong or weak.")
    claimed: float | None = Field(description="Epsilon that the summary states.")
    accountant: float | None = Field(description="Epsilon by the first accountant, from the ledger's mechanisms.")
    second: float | None = Field(description="Epsilon by the second accountant, from the same.")
    delta: float | None = Field(description="Delta of both.")
    releases: int = Field(description="Answers that the ledger holds.")
    problem: str = Field(description="Why the claim isn't confirmed; empty if it is.")


@dataclass(frozen=True)
class Claim:
    """What is claimed of every site of a run."""

    study: Study
    study_sha256: str
    run_id: str
    unit: str
    epsilon: float
    delta: float


class Verification(BaseModel):
    """Whether a run's claim holds."""

    model_config = ConfigDict(frozen=True)

    study_sha256: str = Field(description="Hash of the study.")
    run_id: str = Field(description="Name of the run.")
    unit: str = Field(description="Privacy unit; adjacency is add or remove one.")
    claimed_epsilon: float = Field(description="Epsilon that the summary claims for the corpus.")
    claimed_delta: float = Field(description="Delta that it claims.")
    epsilon: float = Field(description="Largest epsilon of a site, by the second accountant.")
    sites: tuple[SiteVerdict, ...] = Field(description="Every site that was asked for data.")
    holds: bool = Field(description="Whether every such site's ledger was given and confirms the claim.")


class Export(BaseModel):
    """A site's exported ledger, its chain followed."""

    model_config = ConfigDict(frozen=True)

    source: str = Field(description="File it was read from.")
    site: str = Field(description="Name of the site that handed it out, as it says.")
    events: tuple[Event, ...] = Field(description="All events.")

    def of(self, kind: str, site: str, study: str, run: str) -> list[Mapping[str, Any]]:
        """Contents of the events of a kind that belong to a site's run."""
        named = {"site": site, "study": study, "run": run}
        return [e.content for e in self.events if e.kind == kind and named.items() <= e.content.items()]


def read_exports(paths: Iterable[Path]) -> list[Export]:
    """Read exported ledgers: files, or folders of ``*.json``.

    Raises
    ------
    DataError
        If a file can't be read or is no export.
    LedgerError
        If an export's chain is broken.
    """
    files = [f for path in paths for f in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    if not files:
        raise DataError("verify: no exported ledger was given; 'fedcorpus site export' writes one")
    return [_read_export(file) for file in files]


def verify(run: Path, exports: Sequence[Export]) -> Verification:
    """Check the claim of a finished run.

    Raises
    ------
    DataError
        If the run folder has no readable study and summary, or they don't belong together.
    """
    study, summary = finished_run(Workspace(run))
    claim = Claim(study, summary.study_sha256, summary.run_id, summary.unit, summary.epsilon, summary.delta)
    sites = tuple(site_verdict(claim, site, exports) for site in summary.sites if site.epsilon is not None)
    largest = max((site.second for site in sites if site.second is not None), default=0.0)
    return Verification(
        study_sha256=summary.study_sha256,
        run_id=summary.run_id,
        unit=summary.unit,
        claimed_epsilon=summary.epsilon,
        claimed_delta=summary.delta,
        epsilon=largest,
        sites=sites,
        holds=bool(sites) and not any(site.problem for site in sites),
    )


def finished_run(workspace: Workspace) -> tuple[Study, Summary]:
    """The study and the summary of a finished run.

    Raises
    ------
    DataError
        If the folder has no readable ones, or they don't belong together.
    """
    try:
        summary = read_summary(workspace)
        canonical = workspace.study.read_bytes()
        study = Study.from_canonical(canonical.decode("utf-8"))
    except (OSError, ValueError) as cause:
        raise DataError(
            f"{workspace.root}: no run that has finished; a folder with study.json and summary.json is needed"
        ) from cause
    # Of the file as it was written: a later version of this program may know more options.
    if hashlib.sha256(canonical).hexdigest() != summary.study_sha256:
        raise DataError(f"{workspace.root}: study.json isn't the study of summary.json; the folder was changed")
    return study, summary


def site_verdict(claim: Claim, site: SiteSummary, exports: Sequence[Export]) -> SiteVerdict:
    """Whether a site's own ledger, among ``exports``, confirms what is claimed of it."""
    key = (site.name, claim.study_sha256, claim.run_id)
    reserved = [(export, content) for export in exports for content in export.of("reservation", *key)]
    releases = [content for export in exports for content in export.of("release", *key)]
    accountant = second = delta = None
    problem = _problem_of_count(len(reserved), site, any(export.site == site.name for export in exports))
    if not problem and not reserved:
        accountant = second = delta = 0.0
    if not problem and reserved:
        charge = reserved[0][1]
        try:
            delta = float(charge["delta"])
            accountant = joint_epsilon([described(m) for m in charge["mechanisms"]], delta)
            second = second_opinion.epsilon(charge["mechanisms"], delta)
            problem = _problem(claim, site, charge, releases, second)
        except (FedcorpusError, KeyError, TypeError, ValueError, AttributeError) as cause:
            problem = f"its reservation can't be accounted for: {cause}"
    return SiteVerdict(
        site=site.name,
        tier=site.tier,
        claimed=site.epsilon,
        accountant=accountant,
        second=second,
        delta=delta,
        releases=len(releases),
        problem=problem,
    )


def _problem_of_count(reservations: int, site: SiteSummary, has_ledger: bool) -> str:
    if reservations == 1 or (not reservations and not site.answers and has_ledger):
        # Asked in vain, and by its own ledger not charged.
        return ""
    if reservations:
        return f"{reservations} ledgers charge this run for it; a site has one"
    if site.answers:
        return "it answered, and no ledger that was given knows of it"
    return "no ledger that was given knows whether it was charged"


def _problem(
    claim: Claim,
    site: SiteSummary,
    charge: Mapping[str, Any],
    releases: Sequence[Mapping[str, Any]],
    second: float,
) -> str:
    """The first thing that contradicts the claim, or ''."""
    rounds = [int(part.removeprefix("train/")) for part in charge["parts"] if part.startswith("train/")]
    # A site that joined late is charged for the rounds that were left, with the noise of the whole plan.
    whole = site_plan(claim.study, site.tier, site.size_class)
    plan = remaining_plan(whole, claim.study, min(rounds, default=1))
    if not alike(charge["mechanisms"], [describe(m) for m in plan.mechanisms]):
        return "its ledger charges other mechanisms than the study asks for"
    if (charge["tier"], charge["unit"]) != (site.tier, claim.unit):
        return f"its ledger says {charge['tier']!r} and unit {charge['unit']!r}"
    spent = [part for release in releases for part in release["parts"]]
    if len(spent) != len(set(spent)) or not set(spent) <= set(charge["parts"]):
        return f"it gave out {sorted(spent)} of a plan of {sorted(charge['parts'])}"
    if len(releases) < site.answers:
        return f"the coordinator counts {site.answers} answers, its ledger {len(releases)}"
    if not (second <= at_most_about(claim.epsilon) and charge["delta"] <= claim.delta):
        return f"it spent epsilon {second:.4f}, delta {charge['delta']:g}; less was claimed"
    return ""


def alike(these: Sequence[Mapping[str, Any]], those: Sequence[Mapping[str, Any]]) -> bool:
    """Whether two plans are one; another version of the solver may give the last digits of a noise otherwise."""
    return len(these) == len(those) and all(
        this.keys() == that.keys()
        and all(
            math.isclose(this[name], that[name], rel_tol=TOLERANCE) if name in _NOISE else this[name] == that[name]
            for name in that
        )
        for this, that in zip(these, those, strict=True)
    )


def at_most_about(claim: float) -> float:
    """The largest second figure that a claim stands beside."""
    return claim + max(TOLERANCE, TOLERANCE * claim)


def _read_export(file: Path) -> Export:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise DataError(f"{file}: export of format {content['format']!r}; {FORMAT} is accepted")
        events = tuple(Event(**event) for event in content["events"])
        if not all(isinstance(event.content, dict) for event in events):
            raise DataError(f"{file}: an event has no content; 'fedcorpus site export' writes exports")
    except (OSError, ValueError, KeyError, TypeError) as cause:
        if isinstance(cause, FedcorpusError):
            raise
        raise DataError(f"{file}: not an exported ledger; 'fedcorpus site export' writes one") from cause
    if not events or content.get("ledger") != events[0].content.get("ledger"):
        raise LedgerError(f"{file}: the export doesn't begin with its ledger's first event")
    follow_chain(str(file), events)
    return Export(source=str(file), site=str(content.get("site")), events=events)
