"""A generation for people: a bar while it goes on, and what it came to."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from server.markdown import printable
from server.more.generate import Report
from server.report import at_most

_WORDS = {"earlier": "earlier texts read", "texts": "texts made"}
_LINES = 10
"""Lines of a phase where there is no terminal, and codes that are named."""


class GenerationView:
    """Use as a context manager and give every step to `show`."""

    def __init__(self, console: Console) -> None:
        self._console, self._live = console, console.is_terminal
        self._bars = Progress(
            TextColumn("{task.description:20}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not self._live,
        )
        self._tasks = {phase: self._bars.add_task(words, total=None, visible=False) for phase, words in _WORDS.items()}
        self._told = dict.fromkeys(_WORDS, 0)

    def __enter__(self) -> GenerationView:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def show(self, phase: str, done: int, whole: int) -> None:
        """So much of a phase is done."""
        self._bars.update(self._tasks[phase], completed=done, total=whole, visible=True)
        tenth = done * _LINES // max(whole, 1)
        if not self._live and tenth > self._told[phase]:
            self._told[phase] = tenth
            self._console.print(f"{_WORDS[phase]}: {done} of {whole}", highlight=False)


def render_generation(report: Report, console: Console) -> None:
    """Say where the texts are, what is missing, and what they cost."""
    lines = [
        f"{report.texts} of {report.wanted} texts in {report.files} Parquet files in {report.folder}",
        *_missing(report),
        f"dropped: {', '.join(f'{n} {why}' for why, n in sorted(report.dropped.items())) or 'none'}",
        f"{report.privacy} (epsilon {at_most(report.epsilon)}, delta {report.delta:g})",
    ]
    for line in lines:
        console.print(Text(printable(line)), soft_wrap=True)


def _missing(report: Report) -> list[str]:
    named = [f"  {count} are missing under {code}: the model gave no more" for code, count in report.missing.items()]
    more = len(named) - _LINES
    return named[:_LINES] + ([f"  and some under {more} other codes"] if more > 0 else [])
