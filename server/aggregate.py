"""Quotas from profiles, weights from votes, and the draw (RAFT, aggregator). Pure functions.

Every input is noised already, so by post-processing nothing here costs privacy and all of it may be repeated.
A new selection rule is one function and one entry in `SELECTION_RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.errors import ProtocolError, StudyError

Counts = NDArray[np.int64]
Weights = NDArray[np.float64]


@dataclass(frozen=True)
class Selection:
    """Which candidates enter the corpus.

    Attributes
    ----------
    chosen
        Candidate indices, int64; an index repeats only under a rule that draws with replacement.
    shortfall
        Fresh texts still to be generated per code, int64 ``(codes,)``. For every code, chosen + shortfall = quota.
    """

    chosen: Counts
    shortfall: Counts


def sum_profiles(profiles: Sequence[Counts]) -> Counts:
    """Sum of noisy count vectors of equal length.

    Raises
    ------
    ProtocolError
        If there are none, or their lengths differ.
    """
    if not profiles:
        raise ProtocolError("sum_profiles: no profiles; at least one is needed")
    if len({profile.shape for profile in profiles}) != 1:
        raise ProtocolError(f"sum_profiles: profiles have shapes {sorted({p.shape for p in profiles})}; one is needed")
    return np.sum(np.stack(profiles), axis=0, dtype=np.int64)


def quotas(profile: Counts, total: int) -> Counts:
    """How many texts each code gets: proportional to the noisy profile, by largest remainder; sums to ``total``.

    Negative counts are noise around nothing and get nothing. If no count is positive, all codes share
    alike. Computed in integers, so no total is too large; equal remainders go to the lower code.
    """
    shares = [max(0, int(count)) for count in profile]
    if not any(shares):
        shares = [1] * len(shares)
    whole = sum(shares)
    counts = [total * share // whole for share in shares]
    remainders = [total * share % whole for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda code: (-remainders[code], code))
    for code in by_remainder[: total - sum(counts)]:
        counts[code] += 1
    return np.array(counts, dtype=np.int64)


def pool_sizes(profile: Counts | None, codes: int, size: int, floor: float) -> Counts:
    """Candidates per code: ``floor`` of the pool spread evenly, the rest by the strong sites' noisy profile.

    Every code gets at least one, so that codes which only weak sites hold can be voted on. Sums to ``size``.

    Raises
    ------
    StudyError
        If there are more codes than candidates.
    """
    if size < codes:
        raise StudyError(
            f"pool.size is {size}, fewer than the {codes} codes; at least one candidate per code is needed"
        )
    even = max(codes, min(size, round(size * floor)))
    spread = quotas(np.ones(codes, dtype=np.int64), even)
    follow = profile if profile is not None else np.ones(codes, dtype=np.int64)
    return spread + quotas(follow, size - even)


def simplex_weights(votes: Counts, total: float) -> Weights:
    """Noisy votes -> weights that sum to 1: Euclidean projection onto {v >= 0, sum v = total} (Duchi et al. 2008).

    ``total`` is what the votes of a code should sum to, K times the profile. Candidates that only noise voted for get
    exactly 0, where clipping at 0 would keep half of them.
    """
    if not votes.size:
        return np.zeros(0)
    values = votes.astype(np.float64)
    descending = np.sort(values)[::-1]
    excess = np.cumsum(descending) - max(float(total), 1.0)
    ranks = np.arange(1, values.size + 1)
    last = np.flatnonzero(descending - excess / ranks > 0)[-1]
    projected = np.maximum(values - excess[last] / ranks[last], 0.0)
    return np.asarray(projected / projected.sum())


def clipped_weights(votes: Counts) -> Weights:
    """The paper's way: clip at 0 and normalise; all alike if nothing is positive."""
    clipped = np.maximum(votes, 0).astype(np.float64)
    if not clipped.size or not clipped.sum():
        return np.full(votes.size, 1 / max(votes.size, 1))
    return np.asarray(clipped / clipped.sum())


Rule = Callable[[Counts, float, int, np.random.Generator], Counts]
"""(votes of one code's candidates, expected vote total, quota, generator) -> positions chosen among them."""


def select(
    rule: str,
    *,
    votes: Counts,
    codes_of_candidates: NDArray[np.integer],
    quotas: Counts,
    neighbours: int,
    profile: Counts,
    generator: np.random.Generator,
) -> Selection:
    """Fill each code's quota from its candidates.

    Parameters
    ----------
    rule
        A key of `SELECTION_RULES`.
    votes
        Summed noisy ballots, int64 ``(candidates,)``.
    codes_of_candidates
        Code index of each candidate.
    quotas
        Texts wanted per code, int64 ``(codes,)``.
    neighbours
        K: every voting unit gave up to K votes.
    profile
        Summed noisy profile of the sites that voted, int64 ``(codes,)``.
    generator
        For tie breaking and drawing. Not a privacy mechanism.

    Raises
    ------
    StudyError
        If the rule is unknown.
    """
    if rule not in SELECTION_RULES:
        raise StudyError(f"corpus.selection is {rule!r}; one of {sorted(SELECTION_RULES)} is accepted")
    chosen, shortfall = [], np.zeros_like(quotas)
    for code, quota in enumerate(quotas):
        candidates = np.flatnonzero(codes_of_candidates == code)
        expected = neighbours * max(int(profile[code]), 1)
        drawn = SELECTION_RULES[rule](votes[candidates], expected, int(quota), generator)
        chosen.append(candidates[drawn])
        shortfall[code] = quota - drawn.size
    return Selection(np.concatenate(chosen).astype(np.int64), shortfall)


def _highest_first(votes: Counts, expected: float, quota: int, generator: np.random.Generator) -> Counts:
    weights = simplex_weights(votes, expected)
    shuffled = generator.permutation(weights.size)
    ranked = shuffled[np.argsort(-weights[shuffled], kind="stable")]
    return ranked[: min(quota, int(np.count_nonzero(weights)))]


def _weighted(votes: Counts, expected: float, quota: int, generator: np.random.Generator) -> Counts:
    weights = simplex_weights(votes, expected)
    size = min(quota, int(np.count_nonzero(weights)))
    return generator.choice(weights.size, size=size, replace=False, p=weights) if size else _none()


def _with_replacement(votes: Counts, _: float, quota: int, generator: np.random.Generator) -> Counts:
    weights = clipped_weights(votes)
    return generator.choice(weights.size, size=quota, replace=True, p=weights) if weights.size else _none()


def _uniform(votes: Counts, _: float, quota: int, generator: np.random.Generator) -> Counts:
    return generator.permutation(votes.size)[:quota]


def _none() -> Counts:
    return np.zeros(0, dtype=np.int64)


SELECTION_RULES: dict[str, Rule] = {
    "simplex": _highest_first,
    "weighted": _weighted,
    "paper": _with_replacement,
    "uniform": _uniform,
}
