"""Units of each code at the sites, by all that came in: one rule for the quotas and for what is said of them.

units = units_of_voters(study, pool.codes, profiles, ballots)
noise = noise_of_voters(study, pool.codes, len(ballots))
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.site.plan import weak_plan
from common.study import Study
from server.aggregate import combined_sizes, sum_profiles

Counts = NDArray[np.int64]


def votes_tell_sizes(study: Study) -> bool:
    """Whether a unit has one code and gives all its votes within it, so that a code's votes measure its size too."""
    return study.privacy.unit == "record" and not study.codes.multiple


def units_of_voters(
    study: Study, codes_of_candidates: NDArray[np.integer], profiles: Sequence[Counts], ballots: Sequence[Counts]
) -> Counts:
    """Units of each code at the sites that voted, int64 ``(codes,)``.

    Parameters
    ----------
    codes_of_candidates
        Code index of each candidate, ``(candidates,)``.
    profiles, ballots
        Noisy ones of the sites that voted, at least one: int64 ``(codes,)`` and ``(candidates,)``.
    """
    profile = sum_profiles(profiles)
    if not votes_tell_sizes(study):
        return profile
    plan = weak_plan(study)
    return combined_sizes(
        profile,
        sum_profiles(ballots),
        codes_of_candidates,
        votes_per_unit=study.votes_per_unit,
        profile_variance=len(profiles) * plan.profile.scale**2,
        vote_variance=len(ballots) * plan.votes.scale**2,
    )


def noise_of_voters(study: Study, codes_of_candidates: NDArray[np.integer], sites: int) -> NDArray[np.float64]:
    """Standard deviation of the noise on `units_of_voters` of so many sites, float64 ``(codes,)``. Public."""
    plan = weak_plan(study)
    alone = np.full(len(study.codes), sites * plan.profile.scale**2)
    if not votes_tell_sizes(study):
        return np.asarray(np.sqrt(alone))
    candidates = np.bincount(codes_of_candidates, minlength=len(study.codes)).astype(np.float64)
    each = np.maximum(np.minimum(candidates, study.votes_per_unit), 1)
    by_votes = np.where(candidates > 0, candidates * sites * plan.votes.scale**2 / each**2, np.inf)
    # An average by inverse variance: precisions add up.
    return np.asarray(1 / np.sqrt(1 / alone + 1 / by_votes))


def expected_votes(
    study: Study, codes_of_candidates: NDArray[np.integer], units: Counts, ballots: Sequence[Counts]
) -> NDArray[np.float64]:
    """What each code's votes should sum to, float64 ``(codes,)``, at least what one unit gives.

    A record gives K votes in its code, or one to each candidate where there are fewer. Where a unit's votes spread over
    codes, nobody knows how; then it is what the noisy votes do sum to.

    Parameters
    ----------
    units
        As `units_of_voters` tells them.
    """
    candidates = np.bincount(codes_of_candidates, minlength=len(study.codes))
    each = np.minimum(candidates, study.votes_per_unit).astype(np.float64)
    if votes_tell_sizes(study):
        return np.asarray(each * np.maximum(units, 1))
    votes = sum_profiles(ballots).astype(np.float64)
    return np.maximum(np.bincount(codes_of_candidates, weights=votes, minlength=len(study.codes)), each)
