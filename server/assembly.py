"""From profile, pool and votes to the corpus (RAFT, aggregator). Post-processing of noised values: costs no privacy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.models.embedder import load_embedder
from common.protocol import CandidatePool
from common.site.plan import weak_plan
from common.study import Study
from server.aggregate import combined_sizes, quotas, select, sum_profiles
from server.corpus import CorpusText
from server.generation import SyntheticText, TextSampler
from server.strategies.profile_and_vote import Ballots

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class AssembledCorpus:
    """The corpus and how it came about, per code; shapes ``(codes,)``.

    Attributes
    ----------
    texts
        The corpus, ordered by code.
    profile
        Sum of all sites' noisy profiles.
    sizes
        Units of each code, as all that came in says together: the profile, and votes where they tell sizes too.
    wanted
        Quota of each code; sums to the corpus' size.
    holes
        Texts that are missing because a code has no candidate at all and no fresh text could be made. Reported, never
        silent.
    """

    texts: Sequence[CorpusText]
    profile: Counts
    sizes: Counts
    wanted: Counts
    holes: Counts


def to_pool(texts: Sequence[SyntheticText]) -> CandidatePool:
    """Generated texts as the candidate pool."""
    codes = np.array([text.code for text in texts], dtype=np.int32)
    return CandidatePool(tuple(text.text for text in texts), codes)


def assemble_corpus(
    study: Study,
    pool: CandidatePool,
    strong_profiles: Sequence[Counts],
    votes: Ballots,
    sampler: TextSampler,
    on_text: Callable[[int, int], None] = lambda _made, _wanted: None,
) -> AssembledCorpus:
    """Quotas from all profiles, candidates by votes, and fresh text where a quota exceeds the useful candidates."""
    profile = sum_profiles([*strong_profiles, *votes.profiles.values()])
    voters = _voters(study, pool, votes)
    sizes = profile if voters is None else sum_profiles([*strong_profiles, voters])
    wanted = quotas(sizes, study.corpus.size)
    # Without a ballot there is nothing to rank by: a strong-only study draws evenly.
    rule = study.corpus.selection if votes.ballots else "uniform"
    smoothing = study.corpus.smoothing if votes.ballots else "none"
    selection = select(
        rule,
        votes=sum_profiles(list(votes.ballots.values())) if votes.ballots else np.zeros(len(pool), np.int64),
        codes_of_candidates=pool.codes,
        quotas=wanted,
        votes_per_unit=study.votes_per_unit,
        profile=profile if voters is None else voters,
        generator=np.random.default_rng(study.pool.seed),
        smoothing=smoothing,
        embeddings=load_embedder(study.voting).embed(pool.texts) if smoothing == "kernel" else None,
        noise_variance=len(votes.ballots) * weak_plan(study).votes.scale ** 2,
    )
    chosen = [CorpusText(pool.texts[i], int(pool.codes[i]), "candidate") for i in selection.chosen]
    fresh = [CorpusText(t.text, t.code, "top-up") for t in sampler.sample(selection.shortfall, on_text)]
    repeated, holes = _repeats(chosen + fresh, pool, wanted)
    texts = sorted(chosen + fresh + repeated, key=lambda text: text.code)
    return AssembledCorpus(texts, profile, sizes, wanted, holes)


def _voters(study: Study, pool: CandidatePool, votes: Ballots) -> Counts | None:
    """Units of each code at the sites that voted; None if none did."""
    if not votes.ballots:
        return None
    profile = sum_profiles(list(votes.profiles.values()))
    if study.privacy.unit != "record" or study.codes.multiple:
        return profile
    plan = weak_plan(study)
    return combined_sizes(
        profile,
        sum_profiles(list(votes.ballots.values())),
        pool.codes,
        votes_per_unit=study.votes_per_unit,
        profile_variance=len(votes.profiles) * plan.profile.scale**2,
        vote_variance=len(votes.ballots) * plan.votes.scale**2,
    )


def _repeats(texts: Sequence[CorpusText], pool: CandidatePool, wanted: Counts) -> tuple[list[CorpusText], Counts]:
    """Fill what no fresh text could fill with the code's texts again, in turn; an empty code leaves a hole."""
    made = np.bincount([text.code for text in texts], minlength=wanted.size)
    holes = np.zeros_like(wanted)
    repeated: list[CorpusText] = []
    for code in np.flatnonzero(wanted > made):
        missing = int(wanted[code] - made[code])
        source = [t.text for t in texts if t.code == code] or [
            text for text, of in zip(pool.texts, pool.codes, strict=True) if of == code
        ]
        if not source:
            holes[code] = missing
            continue
        repeated += [CorpusText(source[i % len(source)], int(code), "repeat") for i in range(missing)]
    return repeated, holes
