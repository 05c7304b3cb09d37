"""How long what is left will take: by what earlier steps took, else by a short trial of the model.

A step says how many units of work it is; its kind and rate say which steps take alike long for one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from server.experiments.cache import Cache, Earlier, Step
from server.experiments.pretraining import PretrainedModel
from server.experiments.situation import MODEL, Situation

_TRIED = ("tuning", "plain-tuning", "attacks", "pool", "variations", "corpus")
"""Kinds of steps whose time is the model's."""

_GUESSES = {"model": 1e-10, "votes": 1e-3, "judgement": 1e-2, "corpus": 5e-3, "real": 1.0}
"""Seconds a unit, until some were measured."""

_UNTRIED = 2e-3
"""Seconds a token of a model that nobody has time to try out."""

_DOCUMENTS, _TEXTS = 8, 64
_FILE = "rates.json"


class Trial(Step):
    """Some seconds with a model: a training step and a few texts."""

    kind = "trial"
    sources = ("server/experiments/estimate.py",)

    def __init__(self, situation: Situation) -> None:
        self._situation = situation

    @property
    def rate(self) -> str:
        """Models differ."""
        return self._situation.cell.model

    def inputs(self, earlier: Earlier) -> dict[str, Any]:
        """The model, and how long its texts may be."""
        study = self._situation.study
        return {
            "model": self._situation.base_sha256(earlier),
            "generator": study.generator.model_dump(mode="json", exclude={"base", "init_seed"}),
            "pool": study.pool.model_dump(mode="json", exclude={"size", "seed"}),
        }

    def make(self, earlier: Earlier, out: Path, work: Path) -> None:
        """Measure, on texts that judge."""
        from common.models.generator import Generator, document_losses
        from server.generation import TextSampler

        study = self._situation.study
        study = study.model_copy(
            update={"generator": study.generator.model_copy(update={"base": self._situation.base(earlier)})}
        )
        generator = Generator(study.generator)
        prompts = generator.prompts(study.codes)
        texts = self._situation.data.test.texts[:_DOCUMENTS]
        encoded = generator.encode(texts, [generator.room(prompts[0])] * len(texts))
        batch = generator.batch([prompts[0]] * len(texts), encoded)
        rates = {"tuning": float("inf"), "pool": float("inf")}
        for _ in range(2):
            start = time.monotonic()
            document_losses(generator.model, batch).sum().backward()
            tokens = len(texts) * study.generator.max_tokens
            rates["tuning"] = min(rates["tuning"], (time.monotonic() - start) / tokens)
        sampler = TextSampler(generator, study)
        wanted = _evenly(_TEXTS, len(study.codes))
        start = time.monotonic()
        made = sampler.sample(wanted)
        # Texts that were dropped took their time as well; in a pool as many are.
        rates["pool"] = (time.monotonic() - start) / (max(len(made), 1) * study.pool.max_new_tokens)
        (out / _FILE).write_text(json.dumps(rates), encoding="utf-8")


class Estimates:
    """Seconds that steps will take, by what was measured until now.

    Parameters
    ----------
    patient
        Whether a model that nothing was measured of is tried out, which takes some seconds.
    """

    def __init__(self, cache: Cache, *, patient: bool = True) -> None:
        self._cache, self._patient = cache, patient
        self._measured: dict[tuple[str, str], float | None] = {}
        self._tried: dict[str, dict[str, float]] = {}

    def seconds(self, steps: Iterable[Step], situation: Situation, earlier: Earlier) -> float:
        """Of steps that are left of a cell's chain, of which ``earlier`` are made."""
        return sum(self._seconds(step, situation, earlier) for step in steps)

    def _seconds(self, step: Step, situation: Situation, earlier: Earlier) -> float:
        kind = step.kind, step.rate
        if kind not in self._measured:
            self._measured[kind] = self._cache.seconds_a_unit(*kind)
        measured = self._measured[kind]
        if measured is not None:
            return measured * step.units
        if step.kind not in _TRIED or step.kind in _GUESSES:
            return _GUESSES.get(step.kind, 1.0) * step.units
        rates = self._rates(situation, earlier)
        return rates["pool" if step.kind in ("pool", "variations") else "tuning"] * step.units

    def _rates(self, situation: Situation, earlier: Earlier) -> dict[str, float]:
        model = situation.cell.model
        options = situation.experiment.models[model].pretraining
        if options is not None and MODEL not in earlier:
            # A token takes as long in all that is done with a model as in making it, roughly.
            token = (self._cache.seconds_a_unit(PretrainedModel.kind, "") or _GUESSES["model"]) * options.weights
            return {"tuning": token, "pool": token}
        if not self._patient:
            return {"tuning": _UNTRIED, "pool": _UNTRIED}
        if model not in self._tried:
            made = self._cache.make(Trial(situation), earlier)
            self._tried[model] = json.loads((made.folder / _FILE).read_bytes())
        return self._tried[model]


def in_words(seconds: float) -> str:
    """A duration as people say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _evenly(texts: int, codes: int) -> Any:
    import numpy as np

    return np.bincount(np.arange(texts) % codes, minlength=codes).astype(np.int64)
