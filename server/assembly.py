"""From profile, pool and votes to the corpus (RAFT, aggregator). Post-processing of noised values: costs no privacy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.models.embedder import load_embedder
from common.protocol import CandidatePool
from common.site.plan import weak_plan
from common.study import Study
from server.aggregate import (
    BY_DENSITY,
    Embedded,
    Selection,
    fresh_wanted,
    needs_embeddings,
    quotas,
    select,
    sum_profiles,
)
from server.corpus import CorpusText
from server.generation import OnText, SyntheticText
from server.sizes import expected_votes, units_of_voters
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


class Sampler(Protocol):
    """What writes texts: `TextSampler`, or one that keeps them on disk, too."""

    def sample(self, wanted: Counts, on_text: OnText, *, series: str) -> list[SyntheticText]:
        """Distinct texts, ``wanted[c]`` for every code c if they can be made, ordered by code."""


def to_pool(texts: Sequence[SyntheticText]) -> CandidatePool:
    """Generated texts as the candidate pool."""
    codes = np.array([text.code for text in texts], dtype=np.int32)
    return CandidatePool(tuple(text.text for text in texts), codes)


def assemble_corpus(
    study: Study,
    pool: CandidatePool,
    strong_profiles: Sequence[Counts],
    votes: Ballots,
    sampler: Sampler,
    on_text: OnText = lambda _made, _wanted: None,
) -> AssembledCorpus:
    """Quotas from all profiles, candidates by votes, and fresh text where a code offers too little choice."""
    profile = sum_profiles([*strong_profiles, *votes.profiles.values()])
    voters = _voters(study, pool, votes)
    sizes = profile if voters is None else sum_profiles([*strong_profiles, voters])
    wanted = quotas(sizes, study.corpus.size)
    fresh: list[SyntheticText] = []
    # Without a ballot there is nothing to rank by: a strong-only study draws evenly.
    if voters is None:
        selection = _evenly(study, pool, wanted)
    else:
        if study.corpus.selection in BY_DENSITY:
            offered = np.bincount(pool.codes, minlength=wanted.size)
            fresh = sampler.sample(fresh_wanted(wanted, offered, study.corpus.choice), on_text, series="choice")
        selection = _by_votes(study, pool, votes, voters, wanted, fresh)
    chosen = [CorpusText(pool.texts[i], int(pool.codes[i]), "candidate") for i in selection.chosen]
    more = [*(fresh[i] for i in selection.fresh), *sampler.sample(selection.shortfall, on_text, series="top-up")]
    topped_up = [CorpusText(text.text, text.code, "top-up") for text in more]
    repeated, holes = _repeats(chosen + topped_up, pool, wanted)
    texts = sorted(chosen + topped_up + repeated, key=lambda text: text.code)
    return AssembledCorpus(texts, profile, sizes, wanted, holes)


def _evenly(study: Study, pool: CandidatePool, wanted: Counts) -> Selection:
    return select(
        "uniform",
        votes=np.zeros(len(pool), np.int64),
        codes_of_candidates=pool.codes,
        quotas=wanted,
        expected=np.ones(wanted.size),
        generator=np.random.default_rng(study.pool.seed),
    )


def _by_votes(
    study: Study, pool: CandidatePool, votes: Ballots, voters: Counts, wanted: Counts, fresh: Sequence[SyntheticText]
) -> Selection:
    embedded, offered = None, None
    if needs_embeddings(study.corpus.selection, study.corpus.smoothing):
        embedder = load_embedder(study.voting)
        embedded = embedder.embed(pool.texts)
        codes = np.array([text.code for text in fresh], dtype=np.int32)
        offered = Embedded(codes, embedder.embed([text.text for text in fresh])) if fresh else None
    ballots = list(votes.ballots.values())
    return select(
        study.corpus.selection,
        votes=sum_profiles(ballots),
        codes_of_candidates=pool.codes,
        quotas=wanted,
        expected=expected_votes(study, pool.codes, voters, ballots),
        generator=np.random.default_rng(study.pool.seed),
        smoothing=study.corpus.smoothing,
        embeddings=embedded,
        fresh=offered,
        noise_variance=len(ballots) * weak_plan(study).votes.scale ** 2,
        neighbours=study.neighbours,
        similarity=study.voting.similarity,
    )


def _voters(study: Study, pool: CandidatePool, votes: Ballots) -> Counts | None:
    """Units of each code at the sites that voted; None if none did."""
    if not votes.ballots:
        return None
    return units_of_voters(study, pool.codes, list(votes.profiles.values()), list(votes.ballots.values()))


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
