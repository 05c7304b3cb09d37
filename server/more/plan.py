"""How many texts of which code are made, and in which file they go. Pure functions of released values."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from common.study import Study
from server.aggregate import sum_profiles
from server.sizes import units_of_voters

Counts = NDArray[np.int64]

_GOLDEN = (5**0.5 - 1) / 2


def run_sizes(
    study: Study,
    profiles: Mapping[str, Counts],
    ballots: Mapping[str, Counts],
    codes_of_candidates: NDArray[np.integer],
) -> Counts:
    """Units of each code at all sites of a run, as its corpus was divided by, int64 ``(codes,)``.

    Parameters
    ----------
    profiles, ballots
        Noisy ones by site; whoever has a ballot voted, the others trained.
    codes_of_candidates
        Code index of each candidate, ``(candidates,)``.
    """
    parts = [profile for name, profile in profiles.items() if name not in ballots]
    if ballots:
        voters = [profiles[name] for name in ballots]
        parts.append(units_of_voters(study, codes_of_candidates, voters, list(ballots.values())))
    return sum_profiles(parts)


def shards_for(ordered: Counts, texts_per_shard: int) -> int:
    """Shards that so many texts take, at least one."""
    return max(1, -(-int(ordered.sum()) // texts_per_shard))


def shard_sizes(ordered: Counts, shard: int, shards: int) -> Counts:
    """Texts of each code in one of some shards, int64 ``(codes,)``. All shards together have those that are ordered.

    Every shard is a small corpus with nearly the proportions of the whole, so that a part of them is of use too.

    Parameters
    ----------
    ordered
        Texts of each code, int64 ``(codes,)``.
    shard
        Counted from 0.
    """
    return _before(ordered, shard + 1, shards) - _before(ordered, shard, shards)


def _before(ordered: Counts, shard: int, shards: int) -> Counts:
    """Texts of each code in the shards before one."""
    if shard == shards:
        return ordered
    # Each code begins elsewhere between two texts: rare ones would else all fall into the same shard.
    offsets = np.arange(1, ordered.size + 1) * _GOLDEN % 1
    return np.clip(np.ceil(ordered * (shard / shards) - offsets), 0, ordered).astype(np.int64)
