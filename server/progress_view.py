"""Shows a run's progress events to a person: live bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

_WORDS = {
    "census": "census of the sites",
    "training": "rounds of DP LoRA training",
    "pool": "candidates generated",
    "votes": "weak sites voted",
    "corpus": "texts of the corpus",
}


class _Bars(Progress):
    """Bars, and below them how far the sites of the running phase are."""

    states: Mapping[str, str] = {}

    def get_renderables(self) -> Iterable[RenderableType]:
        """What is drawn, on every refresh."""
        yield from super().get_renderables()
        if self.states:
            table = Table.grid(padding=(0, 2))
            for name, state in self.states.items():
                table.add_row("", Text(name), Text(state))
            yield table


class ProgressView:
    """Use as a context manager and give every event to `show`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = console.is_terminal
        self._bars = _Bars(
            SpinnerColumn(),
            TextColumn("{task.description:28}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not self._live,
        )
        self._tasks: dict[str, Any] = {}
        self._states: dict[str, str] = {}

    def __enter__(self) -> ProgressView:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def show(self, event: dict[str, Any]) -> None:
        """Show one event of `server.progress.Progress`."""
        name, phase = event["event"], str(event.get("phase", ""))
        if name == "phase":
            self._tasks[phase] = self._bars.add_task(_WORDS.get(phase, phase), total=event["total"])
            self._line(f"{_WORDS.get(phase, phase)} …")
        elif name == "step":
            self._bars.update(self._tasks[phase], completed=event["done"], total=event["total"])
        elif name == "sites":
            self._show_sites(event["states"])
        elif name == "phase-done":
            self._bars.states = {}
            task = self._bars.tasks[self._tasks[phase]] if self._live else None
            if task is not None:
                self._bars.update(task.id, completed=task.total)
                self._bars.stop_task(task.id)
            self._line(f"{_WORDS.get(phase, phase)}: done in {event['seconds']:.0f} s")
        elif name == "note":
            self._bars.console.print(f"  {escape(str(event['text']))}", highlight=False)

    def _show_sites(self, states: Mapping[str, str]) -> None:
        """A table that changes in place on a terminal; elsewhere a line for every change."""
        self._bars.states = dict(states)
        for site, state in states.items():
            if self._states.get(site) != state:
                self._line(f"  {escape(site)}: {escape(state)}")
        self._states = dict(states)

    def _line(self, text: str) -> None:
        if not self._live:
            self._console.print(text, highlight=False)
