"""One cell with one seed: who holds what, and which model writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from common.models.manifest import manifest_of_base
from common.study import Study
from server.evaluation.surface import shuffled_words
from server.evaluation.texts import Texts
from server.experiments.cache import Cache, Earlier
from server.experiments.canaries import Canaries
from server.experiments.data import PATIENT, RealData, RealDocuments
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
        planted = list(self._planted)
        return [
            self._holding(name, self.data.train.at(documents), planted if place == 0 else ())
            for place, (name, documents) in enumerate(self._training.items())
        ]

    @cached_property
    def canaries(self) -> Canaries | None:
        """Secrets of the first site that trains, under the code that most of its documents have."""
        if not self.cell.canaries or not self._training:
            return None
        first = self.data.train.at(next(iter(self._training.values()))).rows
        names = self.experiment.codes.names
        code = Counter(tuple(row[name] for name in names) for row in first).most_common(1)[0][0]
        return Canaries.made_up(self.cell.canaries, dict(zip(names, code, strict=True)), self.seed)

    @cached_property
    def attacked(self) -> tuple[Texts, Texts]:
        """As many documents that were learnt from as test texts, for attacks: members, and others."""
        documents = self.data.train.at(np.concatenate(list(self._training.values())))
        members, others = documents.texts("documents", self.experiment.codes.names), self.data.test
        number = min(self.experiment.judging.most, len(members), len(others))
        return members.drawn(number, self.seed), others.drawn(number, self.seed)

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

    @cached_property
    def _training(self) -> Mapping[str, Numbers]:
        """Documents of the sites that train, by the site's name."""
        numbers = {"strong": sorted(self.split.strong), "all": range(len(self.split.sites)), "nobody": ()}
        if self.cell.trains == "pooled":
            return {"pooled": np.arange(len(self.data.train))}
        return {_name(number): self.split.sites[number] for number in numbers[self.cell.trains]}

    @property
    def _planted(self) -> Iterator[Mapping[str, str]]:
        if self.canaries is not None:
            has_patients = self.study.privacy.unit == "patient" or self.experiment.data.patient_column is not None
            yield from self.canaries.rows(self.cell.canary_copies, PATIENT if has_patients else None)

    def _numbered(self, number: int) -> SiteDocuments:
        return self._holding(_name(number), self.data.train.at(self.split.sites[number]))

    def _garbage(self, number: int) -> SiteDocuments:
        """A site whose documents are real words in random order, under the codes that it has."""
        documents = self.data.train.at(self.split.sites[number])
        shuffled = shuffled_words([row["text"] for row in documents.rows], self.seed)
        return self._holding(_name(number), documents.saying(shuffled))

    def _holding(self, name: str, documents: RealDocuments, planted: Sequence[Mapping[str, str]] = ()) -> SiteDocuments:
        unit, has_patients = self.study.privacy.unit, self.experiment.data.patient_column is not None
        if unit == "patient" and not has_patients:
            documents = documents.of_patients(self.cell.documents_per_patient)
        documents = documents.and_also(planted)
        return SiteDocuments.of(name, documents.lines(range(len(documents))), unit)


def _name(number: int) -> str:
    return f"site-{number + 1:02d}"


@cache
def _digest(base: str) -> str:
    """Of a model's files, read once in a process."""
    return manifest_of_base(base).digest
