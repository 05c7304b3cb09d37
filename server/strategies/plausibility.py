"""What a weak site's answer can be at most, from public numbers alone; what is beyond that is capped.

A unit casts at most R votes, one for a candidate, under its own codes; the site's noisy profile says how many units it
has there, and the study how many a site may count for. A declared size class is no help: it bounds a site's units from
below. Noise beyond the bands below happens to an honest site once in `FAILURE` answers. So capping never touches honest
answers, and a site that stuffs its ballot moves no candidate further than the units that it claims, and none of a code
that it doesn't claim further than noise may. A lie that is consistent, a large claim and votes to match, is bounded by
``federation.max_units`` only.

An answer is capped, never thrown away: within its bounds it does no more harm than an honest one, and a site that has
paid for its answer and miscounts a little, or is larger than the study expects, still counts.

Answers are noised: by post-processing this costs no privacy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.privacy.accounting import WeakPlan
from common.study import Study

Counts = NDArray[np.int64]

FAILURE = 1e-9
"""Chance that the noise of an honest site's answer is beyond the bands, over all cells and sums of its answer."""

_SAFE = 2**62
"""A float this large still is an int64."""


@dataclass(frozen=True)
class Plausible:
    """An answer within its bounds.

    Attributes
    ----------
    profile, ballot
        int64 ``(codes,)`` and ``(candidates,)``.
    capped
        Whether anything was beyond its bound.
    """

    profile: Counts
    ballot: Counts
    capped: bool


@dataclass(frozen=True)
class VoteBounds:
    """How far one site's ballot can move anything: its public cap.

    Attributes
    ----------
    least, most
        Of the votes on a candidate, and on a candidate of each code, int64 ``(codes,)``.
    least_sums, most_sums
        Of the votes on each code's candidates together, int64 ``(codes,)``.
    least_total, most_total
        Of all votes together.
    """

    least: int
    most: Counts
    least_sums: Counts
    most_sums: Counts
    least_total: int
    most_total: int


def plausible(
    study: Study, plan: WeakPlan, pool_codes: NDArray[np.integer], profile: Counts, ballot: Counts
) -> Plausible:
    """Cap what a site's units and its noise can't explain.

    A site that claims more units than the study lets it count for is scaled down as a whole. Then every candidate's
    votes are brought within their bounds; then, where a sum is beyond its own, the votes of its sign are scaled alike.

    Parameters
    ----------
    plan
        The site's noise, as computed here from the study.
    pool_codes
        Code index of each candidate.
    profile, ballot
        As the site sent them, int64 ``(codes,)`` and ``(candidates,)``.
    """
    codes, most_units = len(study.codes), study.federation.max_units
    noise = _Bands(plan, codes, len(pool_codes))
    together = study.privacy.codes_per_unit * most_units + noise.profile_sum
    claimed = float(np.maximum(profile, -noise.profile).sum(dtype=np.float64))
    scaled_profile, scaled_ballot = (_scaled(v, min(1.0, together / max(claimed, 1.0))) for v in (profile, ballot))

    within = np.clip(scaled_profile, -noise.profile, most_units + noise.profile)
    within = _bounded(within, -noise.profile_sum, together)

    bounds = vote_bounds(study, plan, pool_codes, within)
    capped = np.clip(scaled_ballot, bounds.least, bounds.most[pool_codes])
    sums = np.clip(_sums(capped, pool_codes, codes), bounds.least_sums, bounds.most_sums)
    capped = _with_sums(capped, pool_codes, _bounded(sums, bounds.least_total, bounds.most_total))
    changed = not (np.array_equal(within, profile) and np.array_equal(capped, ballot))
    return Plausible(within, capped, changed)


def vote_bounds(study: Study, plan: WeakPlan, pool_codes: NDArray[np.integer], profile: Counts) -> VoteBounds:
    """What the ballot of a site with this noisy ``profile``, int64 ``(codes,)`` within its own bounds, can hold."""
    codes, most_units = len(study.codes), study.federation.max_units
    noise = _Bands(plan, codes, len(pool_codes))
    # No cell holds more than ``max_units`` and a band, so nothing below can overflow.
    counted = np.maximum(profile + noise.profile, 0)
    all_counted = max(0, int(profile.sum()) + noise.profile_sum)
    units = counted
    per_unit = study.privacy.codes_per_unit
    if study.privacy.unit == "patient" and per_unit < codes:
        # A patient with documents under more than c codes votes under all of them but counts under c others.
        units = counted + np.maximum(all_counted - counted, 0) // per_unit
    units = np.minimum(units, min(all_counted, most_units))
    sizes = np.bincount(pool_codes, minlength=codes)
    of_sums = np.ceil(noise.vote * np.sqrt(sizes)).astype(np.int64)
    of_total = math.ceil(noise.vote * math.sqrt(len(pool_codes)))
    return VoteBounds(
        least=-noise.vote,
        most=units + noise.vote,
        least_sums=-of_sums,
        most_sums=np.minimum(study.votes_per_unit, sizes) * units + of_sums,
        least_total=-of_total,
        most_total=study.votes_per_unit * min(all_counted, most_units) + of_total,
    )


def band(scale: float, chance: float) -> int:
    """What discrete Gaussian noise, or a sum of such of this total scale, exceeds with less than ``chance``.

    It is subgaussian with parameter sigma (Canonne, Kamath & Steinke 2020, corollary 17).
    """
    return math.ceil(scale * math.sqrt(2 * math.log(1 / chance)))


class _Bands:
    """Noise bands of one count and one vote, and of the profile's sum; a sum of n votes has sqrt(n) times a vote's."""

    def __init__(self, plan: WeakPlan, codes: int, candidates: int) -> None:
        # Both ways: every cell, the sums of the profile and of the ballot, and every code's sum of votes.
        share = FAILURE / (2 * codes + 2 * candidates + 2 * 2 + 2 * codes)
        self.profile = band(plan.profile.scale, share)
        self.profile_sum = band(plan.profile.scale * math.sqrt(codes), share)
        self.vote = band(plan.votes.scale, share)


def _scaled(values: Counts, by: float) -> Counts:
    return values if by == 1 else np.trunc(np.clip(values, -_SAFE, _SAFE) * by).astype(np.int64)


def _sums(values: Counts, groups: NDArray[np.integer], number: int) -> Counts:
    """Sum of each group's values, int64 ``(number,)``."""
    sums = np.zeros(number, dtype=np.int64)
    np.add.at(sums, groups, values)
    return sums


def _bounded(values: Counts, least: int, most: int) -> Counts:
    """Values with their sum between ``least <= 0`` and ``most >= 0``; see `_with_sums`."""
    total = int(values.sum())
    return _with_sums(values, np.zeros(values.size, dtype=np.int64), np.array([min(max(total, least), most)]))


def _with_sums(values: Counts, groups: NDArray[np.integer], targets: Counts) -> Counts:
    """Values of which each group sums to its target, but for rounding towards 0.

    Where a group's sum is too large, its values above 0 are scaled down alike; where it is too small, those below 0.
    """
    above = _sums(np.maximum(values, 0), groups, targets.size)
    below = _sums(np.minimum(values, 0), groups, targets.size)
    if np.array_equal(above + below, targets):
        return values
    keep_above = np.where(above + below > targets, (targets - below) / np.maximum(above, 1), 1.0)
    keep_below = np.where(above + below < targets, (targets - above) / np.minimum(below, -1), 1.0)
    keep = np.where(values > 0, keep_above[groups], keep_below[groups])
    return np.asarray(np.trunc(values * np.clip(keep, 0.0, 1.0)).astype(np.int64))
