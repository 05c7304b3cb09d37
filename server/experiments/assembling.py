"""The step that makes the corpus of pool and votes; and the one that takes real documents for it, as a ceiling."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from common.study import Study
from server.assembly import assemble_corpus
from server.corpus import CorpusText, write_corpus
from server.experiments.cache import Earlier, Step, code_sha256
from server.experiments.federation import phase_study
from server.experiments.notes import write_notes
from server.experiments.places import embedder_of, embedder_sha256
from server.experiments.pooling import pool_name, pool_of, votes_name
from server.experiments.situation import CORPUS, TUNED, Situation
from server.experiments.tuning import Tuned
from server.experiments.voting import Votes
from server.experiments.written import KeptTexts
from server.strategies.profile_and_vote import Ballots
from server.workspace import Workspace

_WRITING = ("server/generation.py", "server/decoding", "server/filters.py", "server/seen.py")

_SOURCES = ("server/aggregate.py", "server/assembly.py", "server/sizes.py", "server/smoothing.py", *_WRITING)


class Corpus(Step):
    """The aggregator as it is, on what earlier steps left."""

    kind = "corpus"
    sources = _SOURCES

    def __init__(self, situation: Situation) -> None:
        self._situation = situation

    @property
    def name(self) -> str:
        """Wherever its texts are from."""
        return CORPUS

    @property
    def rate(self) -> str:
        """Where a code has too few candidates, the model writes more."""
        return self._situation.cell.model

    @property
    def units(self) -> float:
        """Texts."""
        return float(self._situation.study.corpus.size)

    def inputs(self, earlier: Earlier) -> dict[str, Any]:
        """The study's part and earlier results."""
        situation, last = self._situation, self._last
        smoothed = situation.study.corpus.smoothing == "kernel"
        embedder = embedder_sha256(situation.study.voting.embedder) if smoothed else None
        named = {name: earlier[name].sha256 for name in (TUNED, pool_name(last), votes_name(last)) if name in earlier}
        return {"study": self._part, "made": named, "model": situation.base_sha256(earlier), "embedder": embedder}

    def make(self, earlier: Earlier, out: Path, work: Path) -> None:
        """As `server.server_app.run_study` has it."""
        situation, last = self._situation, self._last
        study = self._study(situation.base(earlier))
        pool = pool_of(earlier[pool_name(last)])
        votes = Ballots({}, {})
        if votes_name(last) in earlier:
            asked = Votes.read(earlier[votes_name(last)])
            votes, study = asked.ballots, study.model_copy(update={"privacy": asked.study.privacy})
        profiles = list(Tuned.read(earlier[TUNED]).profiles.values()) if TUNED in earlier else []
        if not profiles and not votes.profiles:
            # Nobody was asked anything: all codes alike.
            profiles = [np.ones(len(study.codes), dtype=np.int64)]
        sampler = KeptTexts(situation.cache.written, self._writing(earlier), study, pool, earlier)
        corpus = assemble_corpus(study, pool, profiles, votes, sampler)
        write_corpus(Workspace(out), study.codes, corpus.texts)
        origins = Counter(text.origin for text in corpus.texts)
        write_notes(out, {f"corpus: {name}": float(origins[name]) for name in ("candidate", "top-up", "repeat")})

    def _writing(self, earlier: Earlier) -> dict[str, Any]:
        """What a fresh text hangs on: not the votes, nor what is done with it."""
        study = {name: value for name, value in self._part.items() if name in ("generator", "pool", "codes")}
        named = {name: earlier[name].sha256 for name in (TUNED, pool_name(self._last)) if name in earlier}
        model = self._situation.base_sha256(earlier)
        return {"study": study, "made": named, "model": model, "code": code_sha256(_WRITING)}

    @property
    def _last(self) -> int:
        return self._situation.cell.iterations

    @cached_property
    def _part(self) -> dict[str, Any]:
        study = self._situation.part(self._study("package:none"))
        study["voting"].pop("embedder")
        return study

    def _study(self, base: str) -> Study:
        situation = self._situation
        tuned = situation.cell.trains != "nobody"
        generator = situation.study.generator
        reduced = {"base": base, "max_tokens": generator.max_tokens, "dtype": generator.dtype}
        return phase_study(
            situation.study, ("privacy", "pool", "corpus", "voting", *(["generator"] if tuned else [])), "strong", (),
            generator={"base": base} if tuned else reduced,
            voting={"embedder": embedder_of(situation.study.voting.embedder), "neighbours": situation.study.neighbours},
        )  # fmt: skip


class RealCorpus(Step):
    """Real documents, as many as a corpus has texts: what no corpus can be better than."""

    kind = "real"
    sources = ("server/experiments/assembling.py",)

    def __init__(self, situation: Situation) -> None:
        self._situation = situation

    @property
    def name(self) -> str:
        """Later steps see a corpus."""
        return CORPUS

    def inputs(self, earlier: Earlier) -> dict[str, Any]:
        """Documents."""
        everything = self._situation.data.train.sha256
        return {"documents": everything, "size": self._situation.study.corpus.size, "seed": self._situation.seed}

    def make(self, earlier: Earlier, out: Path, work: Path) -> None:
        """Draw them."""
        situation, codes = self._situation, self._situation.study.codes
        rows = situation.data.train.rows
        drawn = np.random.default_rng(situation.seed).permutation(len(rows))[: situation.study.corpus.size]
        texts = []
        for i in drawn:
            code = codes.index(tuple(rows[i][name] for name in codes.names))
            if code is not None:
                texts.append(CorpusText(rows[i]["text"], code, "candidate"))
        write_corpus(Workspace(out), codes, texts)
