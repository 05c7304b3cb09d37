"""Live progress of a run: the ServerApp appends events to a file in the workspace, the command line follows it.

The ServerApp runs in a process of Flower's own, on the same machine as the coordinator's command line or not; a file
of JSON lines is what both can rely on, and it is there after a crash.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STEP_SECONDS = 0.3
"""Steps that follow faster than this are left out, the last of a phase apart: a file of events stays small."""

PHASES = ("census", "training", "pool", "votes", "corpus")


class Progress:
    """Writes events: ``phase`` (started, its total), ``step`` (done so far), ``sites``, ``note``, ``finished``,
    ``failed``.

    A run that goes on adds to the events of its earlier attempts.

    Attributes
    ----------
    seconds
        Duration of each finished phase, over all attempts.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.seconds = _seconds_so_far(path)
        self._last_step = 0.0
        self._last_states: dict[str, str] = {}

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[None]:
        """Mark a phase of the run; its duration is kept in ``seconds``."""
        started = time.monotonic()
        self._write(event="phase", phase=name, total=total)
        yield
        seconds = round(time.monotonic() - started, 1)
        self.seconds[name] = round(self.seconds.get(name, 0.0) + seconds, 1)
        self._write(event="phase-done", phase=name, seconds=seconds)

    def step(self, phase: str, done: int, total: int) -> None:
        """So much of a phase is done."""
        now = time.monotonic()
        if done < total and now - self._last_step < STEP_SECONDS:
            return
        self._last_step = now
        self._write(event="step", phase=phase, done=done, total=total)

    def sites(self, phase: str, states: Mapping[str, str]) -> None:
        """How far each site of a phase is, by name; written when it differs from what was written last."""
        if dict(states) != self._last_states:
            self._last_states = dict(states)
            self._write(event="sites", phase=phase, states=self._last_states)

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


def _seconds_so_far(path: Path) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for event in ProgressReader(path).new_events():
        if event["event"] == "phase-done":
            phase = str(event["phase"])
            seconds[phase] = round(seconds.get(phase, 0.0) + float(event["seconds"]), 1)
    return seconds


class ProgressReader:
    """Reads new events of a progress file that may not exist yet, or end in half a line.

    Parameters
    ----------
    skip
        Whether to leave out the events that are there already, of earlier attempts.
    """

    def __init__(self, path: Path, *, skip: bool = False) -> None:
        self._path = path
        self._position = path.stat().st_size if skip and path.exists() else 0

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
