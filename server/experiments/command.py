"""What ``fedcorpus experiment`` does with its options."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from common.errors import UserError
from server.experiments.cache import Cache, CacheInUseError
from server.experiments.estimate import in_words
from server.experiments.plan import Experiment
from server.experiments.plot import svg
from server.experiments.runner import PLOT, RESULTS, TABLES, Report, Runner, read_rows, with_earlier
from server.experiments.tables import page
from server.workspace import write_atomically


@dataclass(frozen=True)
class Arguments:
    """The options as they were given; what each means is said once, in `server.cli`."""

    file: Path
    data: Path
    out: Path
    budget_hours: float | None = None
    only: Sequence[str] = ()
    only_missing: bool = False
    cache: Path | None = None
    trusting: bool = False
    estimate_only: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a person is told at the end."""

    report: Report
    estimated_seconds: float
    seconds: float
    files: Sequence[Path]

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "rows": [row.model_dump(mode="json") for row in self.report.rows],
            "left": self.report.left,
            "failed": self.report.failed,
            "estimated_seconds": round(self.estimated_seconds, 1),
            "seconds": round(self.seconds, 1),
            "files": [str(file) for file in self.files],
        }


def run(arguments: Arguments, messages: Console) -> Outcome:
    """Run an experiment and write its results, as far as it came.

    Raises
    ------
    UserError
        If something that a person wrote can't be used.
    """
    if not arguments.data.is_dir():
        raise UserError(f"--data {arguments.data}: no such folder; the experiment's text lies there")
    experiment = Experiment.load(arguments.file)
    cache = Cache(arguments.cache or arguments.out / "cache", trusting=arguments.trusting)
    with _Shown(messages) as shown:
        runner = Runner(
            experiment, arguments.data, arguments.out, cache, arguments.only, only_missing=arguments.only_missing,
            say=shown.say, on_done=shown.done, on_progress=shown.step,
        )  # fmt: skip
        if arguments.estimate_only:
            return Outcome(Report(), _estimated_beside_others(runner, cache, shown), 0.0, [])
        with cache.held():
            estimated = _estimated(runner, shown)
            start = time.monotonic()
            shown.total(len(runner.tasks))
            budget = None if arguments.budget_hours is None else arguments.budget_hours * 3600
            report = Report()
            try:
                runner.run(budget, report)
            finally:
                # Also where somebody interrupts it: what is there is shown.
                files = _written(experiment, runner, report, arguments.out)
    return Outcome(report, estimated, time.monotonic() - start, files)


def _estimated_beside_others(runner: Runner, cache: Cache, shown: _Shown) -> float:
    """Asking costs nothing while another experiment is at work in the cache; only no model is tried out then."""
    try:
        with cache.held():
            return _estimated(runner, shown)
    except CacheInUseError:
        return _estimated(runner, shown, patient=False)


def _estimated(runner: Runner, shown: _Shown, *, patient: bool = True) -> float:
    seconds = runner.estimate(patient=patient)
    shown.say(f"{len(runner.tasks)} cells with their seeds; about {in_words(seconds)} of work is left")
    return seconds


def _written(experiment: Experiment, runner: Runner, report: Report, out: Path) -> Sequence[Path]:
    sizes = {"at the sites": len(runner.documents.train), "that judge": len(runner.documents.test)}
    rows = with_earlier(experiment, report.rows, read_rows(out / RESULTS))
    write_atomically(out / TABLES, page(experiment, rows, report, sizes).encode())
    write_atomically(out / PLOT, svg(experiment, rows))
    return [out / TABLES, out / PLOT, out / RESULTS]


class _Shown:
    """Two bars on a terminal, for all cells and for one step; lines elsewhere. Use as a context manager."""

    def __init__(self, messages: Console) -> None:
        self._messages = messages
        self._bars = Progress(
            SpinnerColumn(), TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(), console=messages, transient=True, disable=not messages.is_terminal,
        )  # fmt: skip
        self._cells = self._bars.add_task("cells", total=None)
        self._step = self._bars.add_task("reading", total=None)

    def __enter__(self) -> _Shown:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """What goes on."""
        self._messages.print(text, markup=False, highlight=False, soft_wrap=True)
        self._bars.reset(self._step, description=text.rpartition(": ")[2][:32], total=None)

    def total(self, tasks: int) -> None:
        """How much there is."""
        self._bars.update(self._cells, total=tasks)

    def done(self, tasks: int) -> None:
        """How much of it is done."""
        self._bars.update(self._cells, completed=tasks)

    def step(self, done: int, total: int) -> None:
        """How far a step is."""
        self._bars.update(self._step, completed=done, total=total)
