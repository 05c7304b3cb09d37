"""Numbers per control code: what was asked and came, and what its votes say. The largest codes are shown by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from server.aggregate import sum_profiles
from server.html_report.material import Material
from server.html_report.visible import shortened
from server.html_report.words import several
from server.summary import CodeSummary

SHOWN = 30
"""Codes drawn and listed by name; the rest is summed up."""

LONGEST_NAME = 120

BAND = 2.0
"""Standard deviations in a noise band: noise stays within it 19 times of 20."""


@dataclass(frozen=True)
class CodeRow:
    """One code, or (``of`` > 1) several small ones together.

    Attributes
    ----------
    index
        Of the code; -1 for several.
    name
        Its values, as in a chart.
    profile
        Sum of the sites' noisy counts.
    size, size_noise
        Units by profiles and votes together, which the quota follows, and the standard deviation of its noise.
    share_wanted, share_made, share_low, share_high
        Of the corpus: by quota, as made, and the noise band of what the sites may really hold.
    missing
        Texts that the quota asks for and that aren't there.
    """

    index: int
    of: int
    name: str
    profile: int
    size: int
    size_noise: float
    wanted: int
    made: int
    chosen: int
    fresh: int
    repeated: int
    missing: int
    share_wanted: float
    share_made: float
    share_low: float
    share_high: float


@dataclass(frozen=True)
class VoteRow:
    """The votes on one code's candidates.

    Attributes
    ----------
    sorted_votes
        Highest first, float64 ``(candidates,)``.
    standing_out
        Candidates with more votes than the noise band explains.
    total
        Sum of the votes over the standard deviation of that sum's noise.
    spread
        Standard deviation of what tells the candidates apart over that of the noise on one; 0 if the noise explains
        all of it, NaN for a single candidate.
    spread_by_chance
        What noise alone stays below 19 times of 20.
    """

    index: int
    name: str
    sorted_votes: np.ndarray[tuple[int], np.dtype[np.float64]]
    standing_out: int
    total: float
    spread: float
    spread_by_chance: float


def code_name(code: CodeSummary) -> str:
    """A code's values, on one line."""
    return shortened(" · ".join(code.values), LONGEST_NAME)


def code_rows(material: Material) -> tuple[list[CodeRow], CodeRow | None, CodeRow]:
    """The largest codes in order of their quota, the others together (if there are any), and all together."""
    codes = material.summary.codes
    order = sorted(range(len(codes)), key=lambda i: (-codes[i].wanted, -codes[i].made, i))
    shown, others = order[:SHOWN], order[SHOWN:]
    of = _Totals(
        sum(code.wanted for code in codes),
        sum(code.made for code in codes),
        sum(max(0, int(size)) for size in material.sizes),
    )
    rows = [_row(material, of, [i], code_name(codes[i])) for i in shown]
    rest = _row(material, of, others, several(len(others), "more code")) if others else None
    return rows, rest, _row(material, of, order, "all codes")


def vote_rows(material: Material, indices: Sequence[int]) -> list[VoteRow]:
    """What the votes on the candidates of these codes say; codes without candidates are left out."""
    votes = summed_votes(material)
    rows = []
    for index in indices:
        own = np.sort(votes[material.pool_codes == index])[::-1]
        if own.size:
            rows.append(_vote_row(index, code_name(material.summary.codes[index]), own, material.vote_noise))
    return rows


def summed_votes(material: Material) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Votes on each candidate, summed over the sites, float64 ``(candidates,)``."""
    return sum_profiles(list(material.ballots.values())).astype(np.float64)


class _Totals(NamedTuple):
    """Over all codes; ``positive`` of the noisy sizes, where negative ones get nothing."""

    wanted: int
    made: int
    positive: int


def _row(material: Material, of: _Totals, indices: Sequence[int], name: str) -> CodeRow:
    codes = [material.summary.codes[i] for i in indices]

    def total(field: str) -> int:
        return sum(int(getattr(code, field)) for code in codes)

    wanted, made = total("wanted"), total("made")
    size = sum(int(material.sizes[i]) for i in indices)
    noise = float(np.sqrt(np.sum(material.size_noise[list(indices)] ** 2)))
    return CodeRow(
        index=indices[0] if len(indices) == 1 else -1,
        of=len(indices),
        name=name,
        profile=total("profile"),
        size=size,
        size_noise=noise,
        wanted=wanted,
        made=made,
        chosen=total("chosen"),
        fresh=total("fresh"),
        repeated=total("repeated"),
        missing=sum(max(0, c.wanted - c.made) for c in codes),
        share_wanted=wanted / max(of.wanted, 1),
        share_made=made / max(of.made, 1),
        share_low=_share_of(size - BAND * noise, of.positive, 0.0),
        share_high=_share_of(size + BAND * noise, of.positive, 1.0),
    )


def _share_of(part: float, whole: int, otherwise: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole else otherwise


def _vote_row(index: int, name: str, votes: np.ndarray[tuple[int], np.dtype[np.float64]], noise: float) -> VoteRow:
    several_ = votes.size > 1
    # The noise's own variance, measured on n values, scatters by sqrt(2 / (n - 1)) of itself.
    excess = float(np.var(votes, ddof=1)) / noise**2 - 1 if several_ else math.nan
    return VoteRow(
        index=index,
        name=name,
        sorted_votes=votes,
        standing_out=int(np.count_nonzero(votes > BAND * noise)),
        total=float(votes.sum() / (noise * math.sqrt(votes.size))),
        spread=math.sqrt(max(0.0, excess)) if several_ else math.nan,
        spread_by_chance=math.sqrt(1.645 * math.sqrt(2 / (votes.size - 1))) if several_ else math.nan,
    )
