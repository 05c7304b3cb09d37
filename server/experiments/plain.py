"""Plain fine-tuning of the adapter, without privacy: on public text only, as a comparison."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from common.codes import ControlCodes
from common.models.generator import Generator, document_losses
from common.protocol import Adapter
from common.study import Study
from server.experiments.cache import OnProgress
from server.experiments.federation import SiteDocuments
from server.strategies.aggregation import weighted_mean

AT_ONCE = 16
"""Documents that pass through the model together."""


@dataclass(frozen=True, repr=False)
class PlainSite:
    """Documents of one site, in the open."""

    name: str
    texts: Sequence[str]
    codes: NDArray[np.int64]

    @classmethod
    def read(cls, site: SiteDocuments, study: Study) -> PlainSite:
        """Of a site's file."""
        rows = [json.loads(line) for line in site.content.splitlines()]
        return cls(site.name, [row["text"] for row in rows], np.array([_code(row, study.codes) for row in rows]))

    def profile(self, codes: int) -> NDArray[np.int64]:
        """Exact counts, int64 ``(codes,)``."""
        return np.bincount(self.codes, minlength=codes).astype(np.int64)


def plain_rounds(
    generator: Generator,
    sites: Sequence[PlainSite],
    study: Study,
    seed: int,
    progress: OnProgress = lambda _done, _total: None,
) -> Adapter:
    """All rounds: each site takes its steps from the mean of the last round, with moments that go on.

    Parameters
    ----------
    seed
        Of the batches.
    """
    chance = np.random.default_rng(seed)
    learners = [_Learner(generator, site, study, np.random.default_rng(chance.integers(2**63))) for site in sites]
    adapter: Adapter = generator.adapter()
    for number in range(1, study.training.rounds + 1):
        generator.start_round(number)
        found = [learner.trained(adapter) for learner in learners]
        adapter = {**adapter, **weighted_mean(found, [1.0] * len(found))}
        progress(number, study.training.rounds)
    return adapter


class _Learner:
    """One site's local steps."""

    def __init__(self, generator: Generator, site: PlainSite, study: Study, chance: np.random.Generator) -> None:
        self._generator, self._training, self._chance = generator, study.training, chance
        by_code = generator.prompts(study.codes)
        self._prompts = [by_code[code] for code in site.codes]
        self._texts = generator.encode(site.texts, [generator.room(prompt) for prompt in self._prompts])
        self._rate = min(1.0, study.training.batch_size / max(len(site.texts), 1))
        self._moments: dict[str, dict[str, torch.Tensor]] = {}

    def trained(self, adapter: Adapter) -> Adapter:
        """The adapter's trained part after this round's steps."""
        self._generator.load_adapter(adapter)
        parameters = self._generator.trained
        kind = torch.optim.Adam if self._training.optimizer == "adam" else torch.optim.SGD
        optimizer = kind(list(parameters.values()), lr=self._training.learning_rate)
        if self._training.keep_optimizer:
            for name in parameters.keys() & self._moments.keys():
                optimizer.state[parameters[name]] = self._moments[name]
        for _ in range(self._training.steps):
            self._step(optimizer)
        self._moments |= {
            name: {key: value.clone() for key, value in optimizer.state[parameter].items()}
            for name, parameter in parameters.items()
        }
        return {name: parameter.detach().float().cpu().numpy().copy() for name, parameter in parameters.items()}

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        drawn = np.flatnonzero(self._chance.random(len(self._texts)) < self._rate)
        batch = sorted((int(i) for i in drawn if self._texts[i]), key=lambda i: len(self._texts[i]))
        optimizer.zero_grad()
        for start in range(0, len(batch), AT_ONCE):
            chunk = batch[start : start + AT_ONCE]
            inputs = self._generator.batch([self._prompts[i] for i in chunk], [self._texts[i] for i in chunk])
            (document_losses(self._generator.model, inputs).sum() / len(batch)).backward()
        if batch:
            optimizer.step()


def _code(row: dict[str, str], codes: ControlCodes) -> int:
    index = codes.index(tuple(row[name] for name in codes.names))
    # Documents without a declared code were left out when the data was read.
    return -1 if index is None else index
