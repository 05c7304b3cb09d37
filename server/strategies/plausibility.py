"""What a weak site's answer can be at most, from public numbers alone; what is beyond that is capped.

A unit casts at most R votes, one for a candidate, under its own codes; the site's noisy profile says how many units it
has there, and the study how many a site may count for. Noise beyond the bands below happens to an honest site once in
`FAILURE` answers. So capping never touches honest answers, and a site that stuffs its ballot moves no candidate further
than the units that it claims, and none of a code that it doesn't claim further than noise may.

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


def plausible(
    study: Study, plan: WeakPlan, pool_codes: NDArray[np.integer], profile: Counts, ballot: Counts
) -> Plausible:
    """Cap what a site's units and its noise can't explain.

    Parameters
    ----------
    plan
        The site's noise, as computed here from the study.
    pool_codes
        Code index of each candidate.
    profile, ballot
        As the site sent them, int64 ``(codes,)`` and ``(candidates,)``.
    """
    codes, candidates, most = len(study.codes), len(pool_codes), study.federation.max_units
    # Every cell, both ways, and every code's sum, and the sum of the profile.
    share = FAILURE / (2 * codes + 2 * candidates + codes + 1)
    of_profile, of_votes = band(plan.profile.scale, share), band(plan.votes.scale, share)
    within = np.clip(profile, -of_profile, most + of_profile)

    units = np.clip(within + of_profile, 0, most)
    if study.privacy.unit == "patient":
        # A patient counts under few codes but may vote under more: all units may vote under each.
        together = int(within.sum()) + band(plan.profile.scale * math.sqrt(codes), share)
        units = np.full(codes, max(0, min(together, most)), dtype=np.int64)
    capped = np.clip(ballot, -of_votes, units[pool_codes] + of_votes)
    for code in np.unique(pool_codes):
        own = np.flatnonzero(pool_codes == code)
        room = min(study.votes_per_unit, own.size) * int(units[code])
        capped[own] = _with_sum_at_most(capped[own], room + band(plan.votes.scale * math.sqrt(own.size), share))
    changed = not (np.array_equal(within, profile) and np.array_equal(capped, ballot))
    return Plausible(within, capped, changed)


def band(scale: float, chance: float) -> int:
    """What discrete Gaussian noise, or a sum of such of this total scale, exceeds with less than ``chance``.

    It is subgaussian with parameter sigma (Canonne, Kamath & Steinke 2020, corollary 17).
    """
    return math.ceil(scale * math.sqrt(2 * math.log(1 / chance)))


def _with_sum_at_most(votes: Counts, most: int) -> Counts:
    """Votes with those above 0 scaled down alike, until all together are at most ``most``."""
    excess = int(votes.sum()) - most
    if excess <= 0:
        return votes
    above = np.maximum(votes, 0)
    kept = max(0.0, 1 - excess / int(above.sum()))
    return np.where(votes > 0, np.floor(above * kept), votes).astype(np.int64)
