"""Shows a run's progress events to a person: live bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

_WORDS = {
    "census": "census of the sites",
    "training": "rounds of DP LoRA training",
    "pool": "candidates generated",
    "votes": "weak sites voted",
    "corpus": "texts of the corpus",
}


class ProgressView:
    """Use as a context manager and give every event to `show`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = console.is_terminal
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:28}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not self._live,
        )
        self._tasks: dict[str, Any] = {}

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
        elif name == "phase-done":
            task = self._bars.tasks[self._tasks[phase]] if self._live else None
            if task is not None:
                self._bars.update(task.id, completed=task.total)
                self._bars.stop_task(task.id)
            self._line(f"{_WORDS.get(phase, phase)}: done in {event['seconds']:.0f} s")
        elif name == "note":
            self._bars.console.print(f"  {escape(str(event['text']))}", highlight=False)

    def _line(self, text: str) -> None:
        if not self._live:
            self._console.print(text, highlight=False)
