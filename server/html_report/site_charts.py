"""Charts of sites: what a site's releases cost, what left it, and what its updates say. And of quality numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from server.html_report.canvas import (
    AMBER,
    BAND,
    BLUE,
    GREEN,
    GREY,
    INK,
    MUTED,
    PAPER,
    PLUM,
    RULE,
    SMALL,
    TEXT,
    Canvas,
    bar_height,
    field_of,
    middle,
    name_x,
    room_for,
    rows_of,
    value,
    width_of,
)
from server.html_report.words import number
from server.quality import QualityNumber
from server.report import at_most
from server.strategies.aggregation import RoundReport

LINES = (BLUE, AMBER, GREEN, PLUM)
PROFILE, BALLOT = "profile", "ballot"
"""Names of the columns of what isn't a round."""

MARKS = ("o", "s", "D", "^")
DRAWN_ROUNDS = 60
DRAWN_UPDATES = 12
"""Sites in a round that are drawn one by one."""


@dataclass(frozen=True)
class CostLine:
    """What one kind of site has cost after each step; ``points``: (step, epsilon), ``who``: one of them in words."""

    words: str
    who: str
    points: Sequence[tuple[int, float]]


@dataclass(frozen=True)
class GridRow:
    """What one site gave: a value for every column, 1 given, 0 asked in vain, between for a part, None not asked."""

    site: str
    cells: Sequence[float | None]


def cost(lines: Sequence[CostLine], promised: float | None, rounds: int, has_votes: bool, wide: bool) -> Canvas:
    """Epsilon of all that sites have released, after each round and after the vote."""
    canvas = field_of(wide, right=16, left=40)
    axes = canvas.axes
    vote = rounds + max(1.0, 0.1 * rounds)
    highest = max([epsilon for line in lines for _, epsilon in line.points] + [promised or 0.0])
    if promised is not None:
        axes.axhline(promised, color=INK, lw=1.2, ls=(0, (4, 3)), zorder=2)
    for line, colour, mark in zip(lines, LINES, MARKS, strict=False):
        points = [(step if step <= rounds else vote, epsilon) for step, epsilon in line.points]
        axes.plot(*zip(*points, strict=True), color=colour, lw=2, zorder=3)
        for at, epsilon in points:
            if epsilon:
                (dot,) = axes.plot([at], [epsilon], mark, ms=7, mfc=colour, mec=PAPER, mew=1.2, zorder=4, clip_on=False)
                where = "after the vote" if at == vote else f"after round {at:g}"
                canvas.tip(dot, f"{line.words}, {where}: ε ≤ {at_most(epsilon)}")
    last = vote if has_votes else float(rounds)
    axes.set_ylim(0, highest * 1.12 or 1)
    axes.set_xlim(0, last * 1.03)
    axes.text(0, 1.01, "ε", transform=axes.transAxes, fontsize=TEXT, color=MUTED, ha="right", va="bottom")
    ticks = [t for t in MaxNLocator(6 if wide else 4, integer=True).tick_values(0, rounds) if t <= 0.94 * last]
    axes.xaxis.set_major_locator(FixedLocator([*ticks, last]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: "vote" if v == vote else f"{v:,.0f}"))
    axes.set_xlabel("training round", fontsize=SMALL, color=MUTED, labelpad=7)
    return canvas


def releases(rows: Sequence[GridRow], columns: Sequence[str], wide: bool) -> Canvas:
    """What left each site: a disc for what was given, a ring for what was asked in vain."""
    canvas = rows_of([row.site for row in rows], wide, right=18)
    axes = canvas.axes
    axes.grid(visible=False)
    across = (width_of(wide) - (216 if wide else 6) - 18) / max(len(columns), 1)
    radius = min(5.5, across / 2 - 1)
    for position, row in enumerate(rows):
        y = middle(position, wide)
        axes.axhline(y, color=RULE, lw=0.8, zorder=0.5)
        for column, cell in enumerate(row.cells):
            if cell is None:
                continue
            colour = AMBER if columns[column] in (PROFILE, BALLOT) else BLUE
            face = colour if cell == 1 else PAPER
            (dot,) = axes.plot(
                [column], [y], "o", ms=2 * radius, mfc=face, mec=colour if cell else GREY, mew=1.6, clip_on=False
            )
            canvas.tip(dot, f"{row.site}, {columns[column]}: {_given(cell)}")
    axes.set_xlim(-0.5, len(columns) - 0.5)
    every = max(1, round(34 / across))
    long = [i for i, column in enumerate(columns) if column in (PROFILE, BALLOT)]
    # What is next to a long name goes without.
    beside = {i + step for i in long for step in (-1, 1)} if across <= 52 else set()
    named = [i for i in range(len(columns)) if i in long or ((i - 1) % every == 0 and i not in beside)]
    axes.xaxis.set_major_locator(FixedLocator(named))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda v, _: columns[round(v)].split("–")[0] if round(v) in named else "")
    )
    axes.set_xlabel("training round", fontsize=SMALL, color=MUTED, labelpad=7)
    return canvas


def updates(reports: Sequence[RoundReport], wide: bool) -> Canvas:
    """Norm of each site's change of the adapter, round by round, and their mean."""
    canvas = field_of(wide, right=16)
    axes = canvas.axes
    for report in drawn_rounds(reports):
        if has_many_sites(reports):
            _draw_spread(canvas, report)
            continue
        for update in report.updates:
            (dot,) = axes.plot([report.round], [update.norm], "o", ms=6, mfc=PAPER, mec=BLUE, mew=1.5, clip_on=False)
            canvas.tip(dot, f"{update.site}, round {report.round}: {number(update.norm)}")
    means = [
        (report.round, float(np.mean([update.norm for update in report.updates])))
        for report in drawn_rounds(reports)
        if report.updates
    ]
    axes.plot([r for r, _ in means], [m for _, m in means], color=INK, lw=1.4, zorder=2.5 if len(means) > 1 else 1.5)
    axes.set_ylim(0, max([u.norm for report in reports for u in report.updates] + [1e-9]) * 1.12)
    first, last = reports[0].round, reports[-1].round
    axes.set_xlim(first - 0.4, last + 0.4)
    if last - first < 8:
        axes.xaxis.set_major_locator(FixedLocator(range(first, last + 1)))
    axes.text(0, 1.01, "norm", transform=axes.transAxes, fontsize=SMALL, color=MUTED, ha="right", va="bottom")
    axes.set_xlabel("training round", fontsize=SMALL, color=MUTED, labelpad=7)
    return canvas


def has_many_sites(reports: Sequence[RoundReport]) -> bool:
    """Whether a mark for every site's change would make a blot: then a round is drawn as where most of them are."""
    return any(len(report.updates) > DRAWN_UPDATES for report in reports)


def quality(numbers: Sequence[QualityNumber], wide: bool) -> Canvas:
    """Each number with its interval between the bad end of its range, at the left, and the good end."""
    right = room_for([number(one.value) for one in numbers])
    canvas = rows_of([one.name for one in numbers], wide, right=right)
    axes = canvas.axes
    axes.grid(visible=False)
    high = bar_height(wide)
    for position, one in enumerate(numbers):
        y, at = middle(position, wide), _within(one.share(one.value))
        axes.barh(y, 1, high * 0.9, color=BAND, zorder=1)
        axes.barh(y, max(at, 0), high * 0.3, color=GREY, zorder=2)
        if one.low is not None and one.high is not None:
            ends = sorted(_within(one.share(end)) for end in (one.low, one.high))
            axes.plot(ends, [y, y], color=BLUE, lw=2.4, zorder=3, solid_capstyle="butt", clip_on=False)
        (dot,) = axes.plot([at], [y], "o", ms=9, mfc=BLUE, mec=PAPER, mew=1.4, zorder=4, clip_on=False)
        canvas.tip(dot, f"{one.name}: {number(one.value)} of {number(one.floor)} to {number(one.ceiling)}")
        value(canvas, position, number(one.value), INK)
    axes.set_xlim(-0.02, 1.02)
    name_x(canvas, "bad end of the range → good end", percent=True)
    axes.xaxis.set_major_locator(FixedLocator([0.0, 0.5, 1.0]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: {0.0: "worst", 1.0: "best"}.get(float(v), "half way")))
    return canvas


def drawn_rounds(reports: Sequence[RoundReport]) -> list[RoundReport]:
    """All rounds, or an even choice of many."""
    if len(reports) <= DRAWN_ROUNDS:
        return list(reports)
    return [reports[int(i)] for i in np.linspace(0, len(reports) - 1, DRAWN_ROUNDS).round()]


def legend_colours(lines: Sequence[CostLine]) -> Mapping[str, str]:
    """Words of a line -> name of its colour."""
    names = ("blue", "amber", "green", "plum")
    return {line.words: name for line, name in zip(lines, names, strict=False)}


def _draw_spread(canvas: Canvas, report: RoundReport) -> None:
    if not report.updates:
        return
    low, high = np.percentile([update.norm for update in report.updates], [5, 95])
    (line,) = canvas.axes.plot([report.round] * 2, [low, high], color=BLUE, lw=3.5, zorder=2, solid_capstyle="butt")
    canvas.tip(line, f"round {report.round}: {number(low)} to {number(high)} at 9 sites of 10")


def _given(cell: float) -> str:
    return "given" if cell == 1 else "asked in vain" if not cell else "given in some of these rounds"


def _within(at: float) -> float:
    return min(max(at, -0.012), 1.012)
