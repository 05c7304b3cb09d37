"""What left each site, by the coordinator's records: every answer that it took."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from common.models.lora import trained_names
from common.privacy.accounting import StrongPlan, WeakPlan
from server.html_report.material import Material
from server.html_report.site_charts import BALLOT, PROFILE, GridRow
from server.html_report.words import number
from server.summary import SiteSummary

LISTED = 300
"""Releases listed one by one; beyond that a site's rounds are put together."""

DRAWN_SITES = 30
DRAWN_COLUMNS = 24

_COUNT_BYTES = 8
_WEIGHT_BYTES = 4


@dataclass(frozen=True)
class Release:
    """One answer's part, or a site's rounds together.

    Attributes
    ----------
    octets
        Of the numbers alone, without their envelope; None if that isn't known.
    """

    site: str
    tier: str
    what: str
    when: str
    answers: int
    numbers: int
    noise: str
    octets: int | None


def releases(material: Material) -> list[Release]:
    """Everything that left every site, in the order of the summary's sites."""
    rounds = len(material.summary.sites) * (len(material.summary.rounds) + 1)
    together = rounds > LISTED
    return [release for site in material.summary.sites for release in _of_site(material, site, together)]


def grid(material: Material) -> tuple[list[GridRow], list[str]]:
    """The same by site and round, for a chart, and the names of its columns; many rounds share a column.

    Of many sites those are drawn first that were asked in vain, and the others at even distances.
    """
    reports = material.summary.rounds
    bins = [list(part) for part in np.array_split(np.arange(len(reports)), min(len(reports), DRAWN_COLUMNS) or 1)]
    bins = [part for part in bins if part]
    names = [_span([reports[i].round for i in part]) for part in bins]
    answered = [{update.site for update in report.updates} for report in reports]
    has_weak = any(site.tier == "weak" for site in material.summary.sites)
    rows = []
    for site in material.summary.sites:
        strong, asked = site.tier == "strong", site.epsilon is not None
        cells: list[float | None] = [_cell(asked, site.name in material.profiles)]
        for part in bins:
            given = float(np.mean([site.name in answered[i] for i in part]))
            cells.append(given if strong and asked else None)
        if has_weak:
            cells.append(_cell(asked, site.name in material.ballots) if not strong else None)
        rows.append(GridRow(site.name, cells))
    return _drawn(rows), [PROFILE, *names, *([BALLOT] if has_weak else [])]


def _drawn(rows: list[GridRow]) -> list[GridRow]:
    if len(rows) <= DRAWN_SITES:
        return rows
    gaps = [i for i, row in enumerate(rows) if any(cell is not None and cell < 1 for cell in row.cells)]
    first = gaps[: DRAWN_SITES // 2]
    others = [i for i in range(len(rows)) if i not in set(first)]
    even = np.linspace(0, len(others) - 1, DRAWN_SITES - len(first)).round().astype(int)
    return [rows[i] for i in sorted([*first, *(others[int(place)] for place in even)])]


def _cell(asked: bool, given: bool) -> float | None:
    return float(given) if asked or given else None


def _of_site(material: Material, site: SiteSummary, together: bool) -> Iterator[Release]:
    plan = material.plan(site)
    if site.name in material.profiles:
        size = int(material.profiles[site.name].size)
        scale = "unknown" if plan is None else f"discrete Gaussian, σ = {number(plan.profile.scale)}"
        when = "first answer" if site.tier == "strong" else "vote"
        yield Release(site.name, site.tier, "noisy profile", when, 1, size, scale, size * _COUNT_BYTES)
    rounds = [r.round for r in material.summary.rounds if site.name in {u.site for u in r.updates}]
    noise = "unknown"
    if isinstance(plan, StrongPlan):
        noise = f"Gaussian, σ = {number(plan.training.noise_multiplier)} C a step"
    for part in _runs(rounds) if together else [[r] for r in rounds]:
        weights = sum(_weights(material, r) for r in part)
        when = f"round {_span(part)}" if len(part) == 1 else f"rounds {_span(part)}"
        yield Release(
            site.name, site.tier, "noisy adapter", when, len(part), weights, noise,
            weights * _WEIGHT_BYTES if material.adapter else None,
        )  # fmt: skip
    if site.name in material.ballots:
        size = int(material.ballots[site.name].size)
        scale = "unknown"
        if isinstance(plan, WeakPlan):
            scale = f"discrete Gaussian, σ = {number(plan.votes.scale)}"
        yield Release(site.name, site.tier, "noisy ballot", "vote", 1, size, scale, size * _COUNT_BYTES)


def _weights(material: Material, round_: int) -> int:
    names = trained_names(material.study.generator.lora, material.adapter, round_)
    return sum(prod(material.adapter[name]) for name in names)


def _runs(rounds: Sequence[int]) -> list[list[int]]:
    """Rounds that follow each other, together."""
    runs: list[list[int]] = []
    for round_ in rounds:
        if runs and round_ == runs[-1][-1] + 1:
            runs[-1].append(round_)
        else:
            runs.append([round_])
    return runs


def _span(rounds: Sequence[int]) -> str:
    return f"{rounds[0]}" if len(rounds) == 1 else f"{rounds[0]}–{rounds[-1]}"
