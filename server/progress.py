"""Live progress of a run: the ServerApp appends events to a file in the workspace, the command line follows it.

The ServerApp runs in a process of Flower's own, on the same machine as the coordinator's command line or not; a file
of JSON lines is what both can rely on, and it is there after a crash.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STEP_SECONDS = 0.3
"""Steps that follow faster than this are left out, the last of a phase apart: a file of events stays small."""

PHASES = ("census", "training", "pool", "votes", "corpus")


class Progress:
    """Writes events: ``phase`` (started, its total), ``step`` (done so far), ``note``, ``finished``, ``failed``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.seconds: dict[str, float] = {}
        self._last_step = 0.0

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[None]:
        """Mark a phase of the run; its duration is kept in ``seconds``."""
        started = time.monotonic()
        self._write(event="phase", phase=name, total=total)
        yield
        self.seconds[name] = round(time.monotonic() - started, 1)
        self._write(event="phase-done", phase=name, seconds=self.seconds[name])

    def step(self, phase: str, done: int, total: int) -> None:
        """So much of a phase is done."""
        now = time.monotonic()
        if done < total and now - self._last_step < STEP_SECONDS:
            return
        self._last_step = now
        self._write(event="step", phase=phase, done=done, total=total)

    def note(self, text: str) -> None:
        """Something the coordinator should know now."""
        self._write(event="note", text=text)

    def finished(self) -> None:
        """The run is over and its summary written."""
        self._write(event="finished")

    def failed(self, reason: str) -> None:
        """The run ended without a corpus."""
        self._write(event="failed", text=reason)

    def _write(self, **event: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"at": round(time.time(), 3), **event}) + "\n")


class ProgressReader:
    """Reads new events of a progress file that may not exist yet, or end in half a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def new_events(self) -> list[dict[str, Any]]:
        """Whole events that were written since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        return [json.loads(line) for line in whole.splitlines()]
