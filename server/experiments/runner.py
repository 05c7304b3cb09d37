"""Runs an experiment: what takes least first, within a budget, and every number on disk as soon as it is there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import FedcorpusError, UserError
from server.experiments.cache import Cache, Made, OnProgress, Step
from server.experiments.chain import chain_of, missing, run_chain
from server.experiments.data import RealData
from server.experiments.estimate import Estimates, in_words
from server.experiments.federation import quiet
from server.experiments.notes import read_notes, read_numbers
from server.experiments.plan import Experiment, NamedCell
from server.experiments.situation import JUDGEMENT, MODEL, Situation

RESULTS, TABLES, PLOT = "results.jsonl", "RESULTS.md", "results.svg"

Say = Callable[[str], None]


class Row(BaseModel):
    """A line of ``results.jsonl``: one cell with one seed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    experiment: str = Field(description="Name of the experiment.")
    cell: str = Field(description="Name of the cell.")
    label: str = Field(description="What it shares with the others of its grid.")
    chosen: dict[str, Any] = Field(description="Settings that the grid varies, by dotted name.")
    model: str = Field(description="Name of its generator.")
    seed: int = Field(description="Of this repetition.")
    settings: dict[str, Any] = Field(description="All settings, by dotted name.")
    numbers: dict[str, float] = Field(description="What was measured.")
    notes: dict[str, float] = Field(description="Privacy, noise and sizes.")
    seconds: dict[str, float] = Field(description="How long each step took, by name, whenever it was made.")
    results: dict[str, str] = Field(description="Hash of each step's result.")


@dataclass(frozen=True)
class Task:
    """A cell with a seed."""

    named: NamedCell
    situation: Situation
    chain: Sequence[Step]

    @cached_property
    def name(self) -> str:
        """For people."""
        return f"{self.named.name}, seed {self.situation.seed}"


@dataclass
class Report:
    """How far an experiment is.

    Attributes
    ----------
    rows
        What is there.
    left
        Tasks that the budget didn't allow -> seconds that they are thought to take.
    failed
        Task -> why.
    """

    rows: list[Row] = field(default_factory=list)
    left: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class Runner:
    """One experiment with its documents, its cells and its folder.

    Parameters
    ----------
    data
        Folder of the real and public text.
    out
        Folder of the results.
    only
        Names or labels of cells; none named means all.
    only_missing
        Leave out what the folder has a row of, also if the cache lacks it: to go on with another machine's rows.
    say
        Called with what goes on.
    on_done
        Called with the number of tasks that are done.
    on_progress
        Called with how far the step is that is made.

    Raises
    ------
    UserError
        If anything that a person wrote can't be used; nothing was made then.
    """

    def __init__(
        self,
        experiment: Experiment,
        data: Path,
        out: Path,
        cache: Cache,
        only: Sequence[str] = (),
        *,
        only_missing: bool = False,
        say: Say = lambda _: None,
        on_done: Callable[[int], None] = lambda _: None,
        on_progress: OnProgress = lambda _done, _total: None,
    ) -> None:
        self._experiment, self._out, self._cache = experiment, out, cache
        self._say, self._on_done, self._on_progress = say, on_done, on_progress
        documents = RealData.load(experiment.data, experiment.codes, data)
        self.documents = documents
        there = set(_last(experiment, read_rows(out / RESULTS))) if only_missing else set()
        self.tasks = [
            Task(named, situation, chain_of(situation, data))
            for named in _chosen(experiment, only)
            for seed in experiment.seeds
            if (named.name, seed) not in there
            for situation in [Situation(experiment, documents, named.cell, seed, cache)]
        ]
        for task in self.tasks:
            # Partitions and studies that don't work are told now, not in an hour.
            missing(task.chain, cache)
        out.mkdir(parents=True, exist_ok=True)

    def estimate(self, *, patient: bool = True) -> float:
        """Seconds that all tasks will take; what they share counts once.

        Parameters
        ----------
        patient
            Whether a model that nothing was measured of is tried out, which takes seconds and needs the cache held.
        """
        estimates, counted, total = Estimates(self._cache, patient=patient), set[str](), 0.0
        for task in self.tasks:
            new = {key: step for key, step in missing(task.chain, self._cache).items() if key not in counted}
            counted |= set(new)
            total += estimates.seconds(new.values(), task.situation, self._earlier(task))
        return total

    def run(self, budget_seconds: float | None = None, report: Report | None = None) -> Report:
        """Do all tasks, or those that fit the budget; what was done before isn't done again.

        Parameters
        ----------
        report
            Grows while it runs, so that whoever interrupts it has what is there.
        """
        report, waiting = Report() if report is None else report, list(self.tasks)
        deadline = None if budget_seconds is None else time.monotonic() + budget_seconds
        known = {(row.cell, row.seed, row.results[JUDGEMENT]) for row in read_rows(self._out / RESULTS)}
        while waiting:
            seconds, task = self._cheapest(waiting)
            if deadline is not None and time.monotonic() + seconds > deadline:
                estimates = Estimates(self._cache)
                report.left = {t.name: self._seconds(t, estimates) for t in waiting}
                self._say(f"stopped: {task.name} takes about {in_words(seconds)}, which the budget doesn't have")
                break
            waiting.remove(task)
            self._on_done(len(self.tasks) - len(waiting) - 1)
            done = len(self.tasks) - len(waiting)
            try:
                row = self._do(task, f"{done} of {len(self.tasks)}: {task.name}")
            except FedcorpusError as error:
                report.failed[task.name] = f"{error}" or type(error).__name__
                self._say(f"failed: {task.name}: {error}")
                continue
            report.rows.append(row)
            if (row.cell, row.seed, row.results[JUDGEMENT]) not in known:
                _append(self._out / RESULTS, row)
        return report

    def _cheapest(self, tasks: Sequence[Task]) -> tuple[float, Task]:
        """The next task: what takes least, and of equals the first seed, then the first cell."""
        order = {id(task): place for place, task in enumerate(self.tasks)}
        estimates = Estimates(self._cache)
        ranked = [(self._seconds(task, estimates), task.situation.seed, order[id(task)], task) for task in tasks]
        seconds, _, _, task = min(ranked, key=lambda entry: entry[:3])
        return seconds, task

    def _seconds(self, task: Task, estimates: Estimates) -> float:
        left = missing(task.chain, self._cache)
        return estimates.seconds(left.values(), task.situation, self._earlier(task)) if left else 0.0

    def _earlier(self, task: Task) -> Mapping[str, Made]:
        """The model of a task, if it is made here and there already."""
        first = task.chain[0]
        found = self._cache.find(first, {}) if first.name == MODEL else None
        return {} if found is None else {MODEL: found}

    def _do(self, task: Task, words: str) -> Row:
        with quiet():
            made = run_chain(
                task.chain, self._cache, lambda step: self._say(f"{words}: {step.name}"), self._on_progress
            )
        named, situation = task.named, task.situation
        return Row(
            experiment=self._experiment.name,
            cell=named.name,
            label=named.label,
            chosen=dict(named.chosen),
            model=named.cell.model,
            seed=situation.seed,
            settings=named.cell.settings,
            numbers=read_numbers(made.values()),
            notes=read_notes(made.values()),
            seconds={name: result.seconds for name, result in made.items()},
            results={name: result.sha256 for name, result in made.items()},
        )


def read_rows(path: Path) -> list[Row]:
    """Rows of ``results.jsonl``; a line that was broken off doesn't count."""
    rows: list[Row] = []
    if not path.exists():
        return rows
    for line in path.read_bytes().splitlines():
        try:
            rows.append(Row.model_validate_json(line))
        except ValidationError:
            continue
    return rows


def with_earlier(experiment: Experiment, rows: Sequence[Row], earlier: Sequence[Row]) -> list[Row]:
    """Rows of this run, and the last ones of earlier runs for cells that this one didn't come to."""
    last = _last(experiment, earlier) | {(row.cell, row.seed): row for row in rows}
    places = {cell.name: place for place, cell in enumerate(experiment.cells)}
    return sorted(last.values(), key=lambda row: (places[row.cell], row.seed))


def _last(experiment: Experiment, rows: Sequence[Row]) -> dict[tuple[str, int], Row]:
    """Cell and seed -> the last row that was made with the settings that the cell has now.

    A row of before there was some setting counts where that has its default: such settings change nothing.
    """
    settings = {cell.name: cell.cell.settings for cell in experiment.cells}
    return {
        (row.cell, row.seed): row
        for row in rows
        if row.cell in settings and {**experiment.defaults, **row.settings} == settings[row.cell]
    }


def _append(path: Path, row: Row) -> None:
    ends_whole = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
    with path.open("ab") as file:
        file.write((b"" if ends_whole else b"\n") + row.model_dump_json().encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _chosen(experiment: Experiment, only: Sequence[str]) -> list[NamedCell]:
    if not only:
        return list(experiment.cells)
    for name in only:
        if not any(name in (cell.name, cell.label) for cell in experiment.cells):
            names = ", ".join(repr(cell.name) for cell in experiment.cells)
            raise UserError(f"--only {name!r}: no such cell; there are {names}")
    return [cell for cell in experiment.cells if cell.name in only or cell.label in only]
