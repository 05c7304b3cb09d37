"""Quotas from profiles, weights from votes, and the draw (RAFT, aggregator). Pure functions.

Every input is noised already, so by post-processing nothing here costs privacy and all of it may be repeated.
A new selection rule is one function and one entry in `SELECTION_RULES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from common.errors import ProtocolError, StudyError
from server.density import Similarity, density_ratio, told_by_neighbours, votes_of_pool
from server.smoothing import smoothed

Counts = NDArray[np.int64]
Weights = NDArray[np.float64]
Votes = NDArray[np.int64] | NDArray[np.float64]
"""Noisy votes as they came in, or smoothed ones."""
Smoothing = Literal["none", "kernel"]


@dataclass(frozen=True)
class Selection:
    """Which texts enter the corpus.

    Attributes
    ----------
    chosen
        Candidate indices, int64; an index repeats only under a rule that draws with replacement.
    fresh
        Indices of the fresh texts that were offered beside the candidates, int64.
    shortfall
        Texts still to be generated per code, int64 ``(codes,)``. For every code, chosen + fresh + shortfall = quota.
    """

    chosen: Counts
    fresh: Counts
    shortfall: Counts


@dataclass(frozen=True)
class Embedded:
    """Texts as points.

    Attributes
    ----------
    codes
        Code index of each text, int ``(n,)``.
    embeddings
        float32 ``(n, d)``, public.
    """

    codes: NDArray[np.integer]
    embeddings: NDArray[np.float32]


def sum_profiles(profiles: Sequence[Counts]) -> Counts:
    """Sum of noisy count vectors of equal length, int64 ``(cells,)`` each; also of ballots.

    A sum can't wrap around: what a single vector may add is capped far above any honest count, so that one hostile
    site can't turn the total negative.

    Raises
    ------
    ProtocolError
        If there are none, or their lengths differ.
    """
    if not profiles:
        raise ProtocolError("sum_profiles: no profiles; at least one is needed")
    if len({profile.shape for profile in profiles}) != 1:
        raise ProtocolError(f"sum_profiles: profiles have shapes {sorted({p.shape for p in profiles})}; one is needed")
    cap = np.iinfo(np.int64).max // len(profiles)
    return np.sum(np.clip(np.stack(profiles, dtype=np.int64), -cap, cap), axis=0, dtype=np.int64)


def combined_sizes(
    profile: Counts,
    votes: Counts,
    codes_of_candidates: NDArray[np.integer],
    *,
    votes_per_unit: int,
    profile_variance: float,
    vote_variance: float,
) -> Counts:
    """Units under each code, from the profile and from what the votes say of it, int64 ``(codes,)``.

    Where every unit has one code and gives each of its k votes within it, a code's votes sum to k times its units. That
    is a second measurement with noise of its own: the two are averaged by inverse variance, which has less noise than
    either. It holds for records of one code; a patient's votes spread over codes.

    Parameters
    ----------
    profile
        Summed noisy profile of the sites that voted, int64 ``(codes,)``.
    votes
        Summed noisy ballots, int64 ``(candidates,)``.
    codes_of_candidates
        Code index of each candidate.
    votes_per_unit
        K; a code with fewer candidates gets one vote on each.
    profile_variance, vote_variance
        Of the noise on one summed count. Public.
    """
    candidates = np.bincount(codes_of_candidates, minlength=profile.size).astype(np.float64)
    # In floats: a sum of many int64 may exceed the largest, and a float can't wrap around.
    cast = np.bincount(codes_of_candidates, weights=votes.astype(np.float64), minlength=profile.size)
    each = np.maximum(np.minimum(candidates, votes_per_unit), 1)
    own_variance = candidates * vote_variance / each**2
    share = np.where(candidates > 0, profile_variance / np.maximum(profile_variance + own_variance, 1e-300), 0.0)
    combined = profile + np.rint(share * (cast / each - profile))
    cap = float(np.iinfo(np.int64).max // 2)
    return np.asarray(np.clip(combined, -cap, cap).astype(np.int64))


def quotas(profile: Counts, total: int) -> Counts:
    """How many texts each code gets: proportional to the noisy profile, by largest remainder; sums to ``total``.

    Negative counts are noise around nothing and get nothing. If no count is positive, all codes share
    alike. Computed in integers, so no total is too large; equal remainders go to the lower code.

    Parameters
    ----------
    profile
        Noisy counts, int64 ``(codes,)``.

    Raises
    ------
    StudyError
        If ``total`` is negative, or there is no code to give it to.
    """
    if total < 0 or not profile.size:
        raise StudyError(f"quotas: {total} texts over {profile.size} codes; at least 0 texts and 1 code are needed")
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

    Every code gets at least one, so that codes which only weak sites hold can be voted on. Sums to ``size``. Without a
    profile, or with nothing positive in it, the whole pool is spread evenly.

    Parameters
    ----------
    profile
        Sum of the strong sites' noisy profiles, int64 ``(codes,)``.
    floor
        Share of the pool, 0 to 1.

    Raises
    ------
    StudyError
        If there are more codes than candidates.
    ProtocolError
        If the profile has another length than there are codes.
    """
    if size < codes:
        raise StudyError(
            f"pool.size is {size}, fewer than the {codes} codes; at least one candidate per code is needed"
        )
    if profile is not None and profile.shape != (codes,):
        raise ProtocolError(f"pool_sizes: the profile has shape {profile.shape}; ({codes},) is needed")
    alike = np.ones(codes, dtype=np.int64)
    if profile is None or not (profile > 0).any():
        # In one go: two even shares would both give their remainder to the lower codes.
        return quotas(alike, size)
    even = max(codes, min(size, round(size * floor)))
    return quotas(alike, even) + quotas(profile, size - even)


def simplex_weights(votes: Votes, total: float) -> Weights:
    """Noisy votes -> weights that sum to 1: Euclidean projection onto {v >= 0, sum v = total} (Duchi et al. 2008).

    Candidates that only noise voted for get exactly 0, where clipping at 0 would keep half of them.

    Parameters
    ----------
    votes
        Votes on one code's candidates, noisy int64 or smoothed float64 ``(J,)``; the result has this shape too. J may
        be 0.
    total
        What the votes should sum to, K times the profile. Without a positive total there is one vote to give out.
    """
    if not votes.size:
        return np.zeros(0)
    # The projection is the same for votes that are all shifted alike. Gaps to the highest vote are exact where floats
    # of the votes aren't; read as unsigned they hold any two int64, so no ballot, however absurd, breaks the sum.
    gaps = votes.max() - votes
    if gaps.dtype.kind == "i":
        gaps = gaps.view(np.uint64)
    gaps = gaps.astype(np.float64)
    ascending = np.sort(gaps)
    filled = np.cumsum(ascending) + (float(total) if total > 0 else 1.0)
    ranks = np.arange(1, gaps.size + 1)
    last = np.flatnonzero(ascending * ranks < filled)[-1]
    projected = np.where(gaps <= ascending[last], np.maximum(filled[last] / ranks[last] - gaps, 0.0), 0.0)
    return np.asarray(projected / projected.sum())


def clipped_weights(votes: Votes) -> Weights:
    """The paper's way (RAFT): clip at 0 and normalise; all alike if nothing is positive. ``(J,)`` -> ``(J,)``."""
    clipped = np.maximum(votes, 0).astype(np.float64)
    if not clipped.size or not clipped.sum():
        return np.full(votes.size, 1 / max(votes.size, 1))
    return np.asarray(clipped / clipped.sum())


@dataclass(frozen=True)
class OneCode:
    """What a rule sees of one code: J candidates, and F fresh texts that nobody voted on.

    Attributes
    ----------
    votes
        Noisy or smoothed, ``(J,)``.
    expected
        What the votes should sum to.
    quota
        Texts wanted.
    noise
        Standard deviation of the noise that is still on a vote; 0 on smoothed ones.
    embeddings, fresh
        float32 ``(J, d)`` and ``(F, d)``; None and empty for rules that don't ask for them.
    neighbours, similarity
        How documents vote: K, and by what.
    """

    votes: Votes
    expected: float
    quota: int
    noise: float
    embeddings: NDArray[np.float32] | None
    fresh: NDArray[np.float32]
    neighbours: int
    similarity: Similarity


Rule = Callable[[OneCode, np.random.Generator], Counts]
"""Positions chosen: below J among the candidates, from J on among the fresh texts."""


def fresh_wanted(quotas: Counts, candidates: Counts, choice: float) -> Counts:
    """Fresh texts per code that make the choice ``choice`` times the quota, int64 ``(codes,)``.

    Parameters
    ----------
    quotas, candidates
        Per code, int64 ``(codes,)``.
    """
    return np.asarray(np.maximum(np.ceil(quotas * choice).astype(np.int64) - candidates, 0) * (quotas > 0))


def select(
    rule: str,
    *,
    votes: Counts,
    codes_of_candidates: NDArray[np.integer],
    quotas: Counts,
    expected: Weights,
    generator: np.random.Generator,
    smoothing: Smoothing = "none",
    embeddings: NDArray[np.float32] | None = None,
    fresh: Embedded | None = None,
    noise_variance: float = 0,
    neighbours: int = 1,
    similarity: Similarity = "cosine",
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
    expected
        What each code's votes should sum to, float64 ``(codes,)``.
    generator
        For tie breaking and drawing. Not a privacy mechanism.
    smoothing
        ``kernel``: the rule sees each code's votes as `server.smoothing.smoothed` leaves them.
    embeddings
        Of the candidates, float32 ``(candidates, d)``, public. Smoothing needs them, and the rules in `BY_DENSITY`.
    fresh
        Texts that came after the votes, for those rules to choose from too.
    noise_variance
        Of the noise on one summed vote count: the sum over the sites that voted of their sigma squared. Public.
    neighbours, similarity
        How documents voted: K, and by what.

    Raises
    ------
    StudyError
        If the rule or the smoothing is unknown.
    ProtocolError
        If there isn't one vote per candidate, or one count per code, or, where needed, one finite embedding per
        candidate.
    PrivacyError
        If the noise has no valid variance.
    """
    if rule not in SELECTION_RULES:
        raise StudyError(f"corpus.selection is {rule!r}; one of {sorted(SELECTION_RULES)} is accepted")
    if votes.shape != codes_of_candidates.shape or expected.shape != quotas.shape:
        raise ProtocolError(
            f"select: votes {votes.shape}, candidates {codes_of_candidates.shape}, expected votes {expected.shape}, "
            f"quotas {quotas.shape}; one vote per candidate and one count per code are needed"
        )
    if smoothing not in get_args(Smoothing):
        raise StudyError(f"corpus.smoothing is {smoothing!r}; one of {sorted(get_args(Smoothing))} is accepted")
    if needs_embeddings(rule, smoothing) and (embeddings is None or len(embeddings) != votes.size):
        given = None if embeddings is None else embeddings.shape
        raise ProtocolError(f"select: {votes.size} candidates, embeddings {given}; one per candidate is needed")
    chosen, chosen_fresh, shortfall = [_none()], [_none()], np.zeros_like(quotas)
    offered = _by_code(fresh.codes, quotas.size) if fresh is not None else [_none()] * quotas.size
    for code, candidates in enumerate(_by_code(codes_of_candidates, quotas.size)):
        # A code that gets no text needs no smoothing, which takes its time.
        if not quotas[code]:
            continue
        own = None if embeddings is None else embeddings[candidates]
        seen: Votes = votes[candidates]
        if smoothing == "kernel" and own is not None:
            seen = smoothed(votes[candidates], own, noise_variance)
        others = np.zeros((0, 0), np.float32) if fresh is None else fresh.embeddings[offered[code]]
        noise = math.sqrt(max(noise_variance, 0.0)) if smoothing == "none" else 0.0
        ballot = OneCode(
            seen, float(expected[code]), int(quotas[code]), noise, own, others, neighbours, similarity
        )  # fmt: skip
        picked = SELECTION_RULES[rule](ballot, generator)
        voted_on = picked < candidates.size
        chosen.append(candidates[picked[voted_on]])
        chosen_fresh.append(offered[code][picked[~voted_on] - candidates.size])
        shortfall[code] = quotas[code] - picked.size
    return Selection(
        np.concatenate(chosen).astype(np.int64), np.concatenate(chosen_fresh).astype(np.int64), shortfall
    )  # fmt: skip


def needs_embeddings(rule: str, smoothing: str) -> bool:
    """Whether the coordinator needs the embedder that sites vote with."""
    return smoothing == "kernel" or rule in BY_DENSITY


def _by_code(codes_of_candidates: NDArray[np.integer], codes: int) -> list[Counts]:
    """Candidate indices of every code, ascending. Sorted once: a study may have a hundred thousand codes."""
    order = np.argsort(codes_of_candidates, kind="stable")
    bounds = np.searchsorted(codes_of_candidates[order], np.arange(codes + 1))
    return [order[start:end] for start, end in pairwise(bounds)]


def _densest_first(ballot: OneCode, generator: np.random.Generator) -> Counts:
    if ballot.embeddings is None:
        raise ProtocolError("select: no embeddings of the candidates; the rule 'density' needs one per candidate")
    votes = simplex_weights(ballot.votes, ballot.expected) * max(ballot.expected, 1.0)
    of_pool = votes_of_pool(ballot.embeddings, ballot.neighbours, ballot.similarity)
    ratios = density_ratio(votes, of_pool, ballot.neighbours)
    told = told_by_neighbours(ratios, ballot.embeddings, ballot.fresh)
    return _ranked(np.concatenate([ratios, told]), generator)[: ballot.quota]


def _highest_first(ballot: OneCode, generator: np.random.Generator) -> Counts:
    weights = simplex_weights(ballot.votes, ballot.expected)
    return _ranked(weights, generator)[: min(ballot.quota, int(np.count_nonzero(weights)))]


def _ranked(scores: Weights, generator: np.random.Generator) -> Counts:
    """Positions, highest score first, equal ones in random order."""
    shuffled = generator.permutation(scores.size)
    return np.asarray(shuffled[np.argsort(-scores[shuffled], kind="stable")])


def _weighted(ballot: OneCode, generator: np.random.Generator) -> Counts:
    weights = simplex_weights(ballot.votes, ballot.expected)
    size = min(ballot.quota, int(np.count_nonzero(weights)))
    return generator.choice(weights.size, size=size, replace=False, p=weights) if size else _none()


def _above_noise(ballot: OneCode, generator: np.random.Generator) -> Counts:
    # In floats: the difference of two int64 may exceed the largest.
    above = np.maximum(ballot.votes.astype(np.float64) - ballot.noise, 0.0)
    weights = above / above.sum() if above.any() else clipped_weights(ballot.votes)
    size = min(ballot.quota, int(np.count_nonzero(weights)))
    return generator.choice(weights.size, size=size, replace=False, p=weights) if size else _none()


def _with_replacement(ballot: OneCode, generator: np.random.Generator) -> Counts:
    weights = clipped_weights(ballot.votes)
    return generator.choice(weights.size, size=ballot.quota, replace=True, p=weights) if weights.size else _none()


def _uniform(ballot: OneCode, generator: np.random.Generator) -> Counts:
    return generator.permutation(ballot.votes.size)[: ballot.quota]


def _none() -> Counts:
    return np.zeros(0, dtype=np.int64)


SELECTION_RULES: dict[str, Rule] = {
    "density": _densest_first,
    "simplex": _highest_first,
    "weighted": _weighted,
    "soft-threshold": _above_noise,
    "paper": _with_replacement,
    "uniform": _uniform,
}
BY_DENSITY = frozenset({"density"})
"""Rules that look at where candidates lie, and can choose among fresh texts too."""
