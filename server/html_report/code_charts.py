"""Charts with a row for every code: what came, proportions, votes, and what of the votes isn't noise."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from server.html_report.canvas import (
    AMBER,
    BAND,
    BLUE,
    GREY,
    INK,
    MUTED,
    PAPER,
    PLUM,
    Canvas,
    bar_height,
    middle,
    name_x,
    room_for,
    rows_of,
    value,
)
from server.html_report.codes import BAND as DEVIATIONS
from server.html_report.codes import CodeRow, VoteRow
from server.html_report.words import count, number, share

DRAWN_VOTES = 160
"""Candidates drawn of one code; of more the highest and an even choice of the others."""

_PARTS = (
    ("chosen", BLUE, "candidates chosen by the votes"),
    ("fresh", AMBER, "generated after the vote"),
    ("repeated", PLUM, "repeats"),
)


def composition(rows: Sequence[CodeRow], rest: CodeRow | None, wide: bool) -> Canvas:
    """Where each code's texts come from, and which are missing. Of the others a number: a bar would dwarf these."""
    every = [*rows, *([rest] if rest else [])]
    right = room_for([_of_wanted(row) for row in every])
    canvas = rows_of([row.name for row in every], wide, right=right, quiet=len(rows))
    for position, row in enumerate(rows):
        y, left = middle(position, wide), 0
        for name, colour, words in _PARTS:
            part = getattr(row, name)
            if part:
                bar = canvas.axes.barh(y, part, bar_height(wide), left=left, color=colour, edgecolor=PAPER, lw=0.6)
                canvas.tip(bar[0], f"{row.name}: {count(part)} {words}")
                left += part
        if row.missing:
            bar = canvas.axes.barh(
                y, row.missing, bar_height(wide), left=left, fill=False, edgecolor=INK, lw=1, linestyle=(0, (2, 2))
            )
            canvas.tip(bar[0], f"{row.name}: {count(row.missing)} are missing")
        value(canvas, position, _of_wanted(row))
    if rest:
        value(canvas, len(rows), _of_wanted(rest))
    canvas.axes.set_xlim(0, max([row.wanted for row in rows] + [row.made for row in rows] + [1]) * 1.02)
    name_x(canvas, "texts in the corpus")
    return canvas


def proportions(rows: Sequence[CodeRow], rest: CodeRow | None, wide: bool) -> Canvas:
    """Share of the corpus of each code, as made and as wanted, in the noise band of its size."""
    canvas = rows_of([row.name for row in [*rows, *([rest] if rest else [])]], wide, quiet=len(rows))
    high = bar_height(wide)
    for position, row in enumerate(rows):
        y = middle(position, wide)
        band = canvas.axes.barh(
            y, row.share_high - row.share_low, high * 1.45, left=row.share_low, color=BAND, zorder=1.5
        )
        canvas.tip(band[0], f"{row.name}: noise leaves {share(row.share_low)} to {share(row.share_high)} open")
        bar = canvas.axes.barh(y, row.share_made, high * 0.62, color=BLUE, zorder=2)
        canvas.tip(bar[0], f"{row.name}: {share(row.share_made)} made, {share(row.share_wanted)} wanted")
        canvas.axes.plot([row.share_wanted] * 2, [y - high * 0.62, y + high * 0.62], color=INK, lw=2, zorder=3)
        value(canvas, position, share(row.share_made))
    if rest:
        value(canvas, len(rows), share(rest.share_made))
    most = max(max(row.share_made, row.share_wanted, row.share_high) for row in rows)
    canvas.axes.set_xlim(0, min(1.0, most) * 1.02)
    name_x(canvas, "share of the corpus", percent=True)
    return canvas


def votes(rows: Sequence[VoteRow], noise: float, wide: bool) -> Canvas:
    """Every candidate's votes as a stroke, the noise band behind them."""
    ends = [f"{count(row.standing_out)} of {count(row.sorted_votes.size)}" for row in rows]
    canvas = rows_of([row.name for row in rows], wide, right=room_for(ends))
    band = DEVIATIONS * noise
    canvas.axes.axvspan(-band, band, color=BAND, lw=0, zorder=0.5)
    canvas.axes.axvline(0, color=GREY, lw=1, zorder=1)
    for position, row in enumerate(rows):
        y, high = middle(position, wide), bar_height(wide) / 2
        drawn = _spread_evenly(row.sorted_votes)
        for inside, colour, width in ((True, GREY, 1.0), (False, BLUE, 1.6)):
            part = drawn[(drawn <= band) == inside]
            if part.size:
                # One path for all: strokes apart by gaps.
                x = np.column_stack([part, part, np.full(part.size, np.nan)]).ravel()
                heights = np.tile([y - high, y + high, np.nan], part.size)
                canvas.axes.plot(x, heights, color=colour, lw=width, solid_capstyle="butt", zorder=2)
        value(canvas, position, ends[position])
    name_x(canvas, "noisy votes on a candidate, all sites together")
    return canvas


def signal(rows: Sequence[VoteRow], wide: bool) -> Canvas:
    """How much candidates of a code differ, over the noise; and what noise alone would look like."""
    canvas = rows_of([row.name for row in rows], wide)
    high = bar_height(wide)
    for position, row in enumerate(rows):
        y = middle(position, wide)
        if math.isnan(row.spread):
            value(canvas, position, "–")
            continue
        band = canvas.axes.barh(y, row.spread_by_chance, high * 1.3, color=BAND, zorder=1.5)
        canvas.tip(band[0], f"{row.name}: noise alone stays below {number(row.spread_by_chance, 2)}")
        canvas.axes.plot([0, row.spread], [y, y], color=GREY, lw=1.2, zorder=2)
        beyond = row.spread > row.spread_by_chance
        (dot,) = canvas.axes.plot(
            [row.spread], [y], "o", ms=8, mfc=BLUE if beyond else PAPER, mec=BLUE if beyond else GREY, mew=1.6,
            zorder=3, clip_on=False,
        )  # fmt: skip
        canvas.tip(dot, f"{row.name}: {number(row.spread, 2)}")
        value(canvas, position, number(row.spread, 2), INK if beyond else MUTED)
    known = [max(row.spread, row.spread_by_chance) for row in rows if not math.isnan(row.spread)]
    canvas.axes.set_xlim(0, max([*known, 1e-3]) * 1.06)
    name_x(canvas, "how much candidates differ / noise on a candidate")
    return canvas


def _of_wanted(row: CodeRow) -> str:
    return f"{count(row.made)} of {count(row.wanted)}" if row.missing else count(row.made)


def _spread_evenly(highest_first: NDArray[np.float64]) -> NDArray[np.float64]:
    if highest_first.size <= DRAWN_VOTES:
        return highest_first
    top = DRAWN_VOTES // 4
    others = np.linspace(top, highest_first.size - 1, DRAWN_VOTES - top).round().astype(int)
    return np.concatenate([highest_first[:top], highest_first[others]])
