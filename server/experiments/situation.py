"""One cell with one seed: who holds what, and which model writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from common.models.manifest import manifest_of_base
from common.study import Study
from server.evaluation.surface import shuffled_words
from server.experiments.cache import Cache, Earlier
from server.experiments.data import RealData, RealDocuments
from server.experiments.federation import SiteDocuments
from server.experiments.partition import Numbers, Split, partition
from server.experiments.plan import Cell, Experiment

MODEL, TUNED, CORPUS, JUDGEMENT = "model", "tuned", "corpus", "judgement"
"""Names of steps that a cell has once. Pools and votes are numbered, as there may be several."""


@dataclass(frozen=True)
class Situation:
    """Everything that the steps of a cell go by."""

    experiment: Experiment
    data: RealData
    cell: Cell
    seed: int
    cache: Cache

    @property
    def homes(self) -> Path:
        """Where sites have their documents and ledgers."""
        return self.cache.homes

    @property
    def vectors(self) -> Path:
        """Where vectors of texts are kept."""
        return self.cache.vectors

    @cached_property
    def study(self) -> Study:
        """The cell's study, with the public seeds of this repetition."""
        template = self.cell.template
        return template.model_copy(
            update={
                "pool": template.pool.model_copy(update={"seed": self.seed}),
                "generator": template.generator.model_copy(update={"init_seed": self.seed}),
            }
        )

    @cached_property
    def split(self) -> Split:
        """Who holds what."""
        return partition(self.cell.partition, self.data.train.columns, len(self.data.train), self.seed)

    @cached_property
    def training_sites(self) -> Sequence[SiteDocuments]:
        """The sites that train."""
        numbers = {"strong": sorted(self.split.strong), "all": range(len(self.split.sites)), "nobody": ()}
        if self.cell.trains == "pooled":
            return [self._site("pooled", np.arange(len(self.data.train)))]
        return [self._numbered(number) for number in numbers[self.cell.trains]]

    @cached_property
    def voting_sites(self) -> Sequence[SiteDocuments]:
        """The sites that vote; if one of them holds garbage, it is the first."""
        numbers = {"weak": self.split.weak, "all": range(len(self.split.sites)), "nobody": ()}
        sites = [self._numbered(number) for number in numbers[self.cell.votes]]
        if self.cell.poisoning == "garbage" and sites:
            sites[0] = self._garbage(numbers[self.cell.votes][0])
        return sites

    @cached_property
    def unseen(self) -> tuple[str, ...]:
        """Values of the judged attribute of which no site that trains holds a document."""
        if self.cell.trains in ("nobody", "pooled", "all"):
            return ()
        values = self.data.train.columns[self.experiment.judged]
        seen = {values[int(i)] for number in self.split.strong for i in self.split.sites[number]}
        return tuple(sorted(set(values) - seen))

    def base(self, earlier: Earlier) -> str:
        """The generator's base model on this machine."""
        declared = self.experiment.models[self.cell.model].base
        return str((earlier[MODEL].folder / "model").resolve()) if declared is None else declared

    def base_sha256(self, earlier: Earlier) -> str:
        """Hash of the generator's base model."""
        declared = self.experiment.models[self.cell.model].base
        return earlier[MODEL].sha256 if declared is None else _digest(declared)

    def part(self, study: Study) -> dict[str, Any]:
        """A study as a step's inputs have it: without the place of its model, which they have the hash of."""
        dumped = study.model_dump(mode="json")
        dumped["generator"].pop("base")
        return dumped

    def _numbered(self, number: int) -> SiteDocuments:
        return self._site(f"site-{number + 1:02d}", self.split.sites[number])

    def _site(self, name: str, documents: Numbers) -> SiteDocuments:
        return self._holding(name, self.data.train.at(documents))

    def _garbage(self, number: int) -> SiteDocuments:
        """A site whose documents are real words in random order, under the codes that it has."""
        documents = self.data.train.at(self.split.sites[number])
        shuffled = shuffled_words([row["text"] for row in documents.rows], self.seed)
        return self._holding(f"site-{number + 1:02d}", documents.saying(shuffled))

    def _holding(self, name: str, documents: RealDocuments) -> SiteDocuments:
        unit, has_patients = self.study.privacy.unit, self.experiment.data.patient_column is not None
        if unit == "patient" and not has_patients:
            documents = documents.of_patients(self.cell.documents_per_patient)
        return SiteDocuments.of(name, documents.lines(range(len(documents))), unit)


@cache
def _digest(base: str) -> str:
    """Of a model's files, read once in a process."""
    return manifest_of_base(base).digest
