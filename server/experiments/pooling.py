"""Steps that make a candidate pool: the generator's own, or of what won the last vote (Private Evolution)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from common.protocol import CandidatePool
from common.study import Study
from server.aggregate import pool_sizes, quotas, sum_profiles
from server.assembly import to_pool
from server.candidate_log import CandidateLog
from server.corpus import read_ballots, read_pool, write_pool
from server.experiments.cache import Earlier, Made, Step
from server.experiments.federation import phase_study
from server.experiments.notes import write_notes
from server.experiments.situation import TUNED, Situation
from server.experiments.tuning import Tuned
from server.experiments.variation import vary

if TYPE_CHECKING:
    from common.models.generator import Generator

Counts = NDArray[np.int64]

KEPT = 0.5
"""Share of a pool that is kept where the others are varied."""

_SOURCES = (
    "common/codes.py",
    "common/models/generator.py",
    "common/models/architectures.py",
    "server/generation.py",
    "server/decoding",
    "server/filters.py",
    "server/seen.py",
    "server/aggregate.py",
)


def pool_name(iteration: int) -> str:
    """Of the pool that is voted on in an iteration, from 1."""
    return f"pool-{iteration}"


def votes_name(iteration: int) -> str:
    """Of that vote."""
    return f"votes-{iteration}"


def pool_of(made: Made) -> CandidatePool:
    """Of a step's result."""
    return read_pool(made.folder / "pool.jsonl")


class _Pool(Step):
    """What both ways have in common."""

    def __init__(self, situation: Situation, iteration: int) -> None:
        self._situation, self._iteration = situation, iteration

    @property
    def name(self) -> str:
        """One for every iteration."""
        return pool_name(self._iteration)

    @property
    def rate(self) -> str:
        """Models differ."""
        return self._situation.cell.model

    @property
    def units(self) -> float:
        """Tokens, at most."""
        pool = self._situation.study.pool
        return float(pool.size * pool.max_new_tokens)

    def inputs(self, earlier: Earlier) -> dict[str, Any]:
        """Model, adapter and the study's part."""
        tuned = earlier.get(TUNED)
        return {
            "study": self._part,
            "model": self._situation.base_sha256(earlier),
            "tuned": None if tuned is None else tuned.sha256,
        }

    @cached_property
    def _part(self) -> dict[str, Any]:
        return self._situation.part(self._study("package:none"))

    def _study(self, base: str) -> Study:
        situation = self._situation
        generator = situation.study.generator
        # Without training the adapter is nothing, whatever its shape.
        options = {"base": base, "max_tokens": generator.max_tokens, "dtype": generator.dtype}
        tuned = situation.cell.trains != "nobody"
        return phase_study(
            situation.study, ("generator", "pool") if tuned else ("pool",), "strong", (),
            generator={"base": base} if tuned else options, privacy={"epsilon": 1.0, "delta": 1e-6},
        )  # fmt: skip


class Pool(_Pool):
    """The candidates of the first vote. Goes on after the last text."""

    kind = "pool"
    sources = _SOURCES

    def make(self, earlier: Earlier, out: Path, work: Path) -> None:
        """As `server.server_app` makes it."""
        from server.generation import TextSampler

        study = self._study(self._situation.base(earlier))
        tuned = Tuned.read(earlier[TUNED]) if TUNED in earlier else None
        profile = sum_profiles(list(tuned.profiles.values())) if tuned else None
        sampler = TextSampler(loaded(study, earlier.get(TUNED)), study)
        sizes = pool_sizes(profile, len(study.codes), study.pool.size, study.pool.floor)
        with CandidateLog(work / "candidates.jsonl", {"step": self.name}) as record:
            texts = sampler.sample(sizes, self.progress, series="pool", record=record)
        write_pool(out / "pool.jsonl", to_pool(texts))
        write_notes(out, {"candidates": float(len(texts)), "texts dropped": float(sum(sampler.drops.counts.values()))})


class VariedPool(_Pool):
    """What won, and variations of it: each begins as a winner does and goes on as the generator likes."""

    kind = "variations"
    sources = (*_SOURCES, "server/experiments/pooling.py", "server/experiments/variation.py")

    def inputs(self, earlier: Earlier) -> dict[str, Any]:
        """Also what won."""
        before = self._iteration - 1
        votes = earlier[votes_name(before)].sha256
        return super().inputs(earlier) | {"pool": earlier[pool_name(before)].sha256, "votes": votes}

    def make(self, earlier: Earlier, out: Path, work: Path) -> None:
        """Keep winners of every code, in the proportions of the pool, and vary them."""
        study = self._study(self._situation.base(earlier))
        before = self._iteration - 1
        pool = pool_of(earlier[pool_name(before)])
        votes = sum_profiles(list(read_ballots(earlier[votes_name(before)].folder / "ballots.npz").values()))
        winners = best(pool, votes, len(study.codes), KEPT)
        texts = [(pool.texts[i], int(pool.codes[i])) for i in winners]
        generator = loaded(study, earlier.get(TUNED))
        varied = vary(generator, texts, len(pool) - len(texts), study, (self._situation.seed, self._iteration))
        codes = np.array([code for _, code in (*texts, *varied)], dtype=np.int32)
        write_pool(out / "pool.jsonl", CandidatePool(tuple(text for text, _ in (*texts, *varied)), codes))
        write_notes(out, {"candidates": float(len(codes))})


def best(pool: CandidatePool, votes: Counts, codes: int, share: float) -> list[int]:
    """A share of each code's candidates, those with most votes; at least one of each."""
    counts = np.bincount(pool.codes, minlength=codes)
    kept = np.maximum(quotas(counts, max(1, round(share * len(pool)))), counts > 0)
    ranked = np.argsort(-votes, kind="stable")
    return [int(i) for code in range(codes) for i in ranked[pool.codes[ranked] == code][: kept[code]]]


def loaded(study: Study, tuned: Made | None) -> Generator:
    """The generator with the adapter of a step's result; kept, since the next step mostly asks for the same."""
    return _loaded(study.generator.model_dump_json(), None if tuned is None else str(tuned.folder), _sha256(tuned))


def _sha256(tuned: Made | None) -> str:
    return "" if tuned is None else tuned.sha256


@lru_cache(maxsize=1)
def _loaded(options: str, folder: str | None, _: str) -> Generator:
    from common import study as studies
    from common.models.generator import Generator

    generator = Generator(studies.Generator.model_validate(json.loads(options)))
    if folder is not None:
        generator.load_adapter(Tuned.read(Made(Path(folder), "", 0.0)).adapter)
    return generator


def pools_and_votes(situation: Situation, vote: type[Step]) -> Sequence[Step]:
    """All of a cell, in turn."""
    steps: list[Step] = []
    for iteration in range(1, situation.cell.iterations + 1):
        steps.append(Pool(situation, 1) if iteration == 1 else VariedPool(situation, iteration))
        if situation.cell.votes != "nobody":
            steps.append(vote(situation, iteration))  # type: ignore[call-arg]
    return steps
