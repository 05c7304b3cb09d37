"""Processes that belong together, and the end of them and of nothing else.

A process that is ended may leave children that nobody knows any more: workers in sessions of their own, whose parent is
gone. So all that a family starts carry a mark in their environment, which their children inherit; what was once seen as
one of them stays known even if it overwrote its environment, as Ray's agents do.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

STOP_SECONDS = 10.0
KILL_SECONDS = 5.0

MARK = "FEDCORPUS_FEDERATION"
"""In the environment of all processes of a family, and so of their children, whatever session they are in."""


@dataclass(frozen=True)
class OneProcess:
    """One process; its start time tells it from a later one with the same id."""

    pid: int
    started: int


class ProcessFamily:
    """Processes by name, and what they start."""

    def __init__(self) -> None:
        self._mark = secrets.token_hex(16)
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._known: frozenset[OneProcess] = frozenset()

    @property
    def names(self) -> Sequence[str]:
        """Of all that were started, in order."""
        return list(self._children)

    @property
    def variables(self) -> Mapping[str, str]:
        """What has to be in a process' environment so that it counts as one of the family."""
        return {MARK: self._mark}

    def start(
        self, name: str, command: Sequence[str], log: BinaryIO, folder: Path, variables: Mapping[str, str]
    ) -> None:
        """Start a process in a session of its own, which writes to ``log`` and works in ``folder``."""
        self._children[name] = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**variables, **self.variables},
            start_new_session=True,
        )

    def exit_code(self, name: str) -> int | None:
        """None while it runs. Raises KeyError for one that was never started."""
        return self._children[name].poll()

    def alive(self) -> list[OneProcess]:
        """All that run now; remembered, so that one whose parent ends stays known as ours."""
        family = _family(f"{MARK}={self._mark}".encode(), self._known)
        self._known = frozenset(entry.process for entry in family)
        return [entry.process for entry in family if not entry.ended]

    def end(self) -> None:
        """End all of them; first gently, then for good.

        Interrupted while it waits, it ends them for good at once.
        """
        try:
            self._end_gently()
        finally:
            self._end_for_good()

    def _end_gently(self) -> None:
        # Before the first signal: who started whom is lost once parents are gone.
        self.alive()
        for child in reversed(self._children.values()):
            child.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for child in self._children.values():
            _wait(child, deadline)
        while (left := self.alive()) and time.monotonic() < deadline:
            for process in left:
                _signal(process.pid, signal.SIGTERM)
            time.sleep(0.2)

    def _end_for_good(self) -> None:
        deadline = time.monotonic() + KILL_SECONDS
        while (left := self.alive()) and time.monotonic() < deadline:
            for process in left:
                _signal(process.pid, signal.SIGKILL)
            time.sleep(0.05)
        for child in self._children.values():
            child.kill()
            _wait(child, deadline)


@dataclass(frozen=True)
class _Entry:
    """What the kernel says of a process. One that has ended may still lead the session of others."""

    process: OneProcess
    ended: bool
    parent: int
    session: int
    marked: bool


def _family(marker: bytes, known: frozenset[OneProcess]) -> list[_Entry]:
    """Processes that carry the marker or are known, and what they started or lead the session of."""
    entries = [entry for path in Path("/proc").glob("[0-9]*") if (entry := _read_entry(path, marker))]
    ours = {entry.process.pid for entry in entries if entry.marked or entry.process in known}
    grown = True
    while grown:
        more = {e.process.pid for e in entries if e.parent in ours or e.session in ours} - ours
        ours |= more
        grown = bool(more)
    return [entry for entry in entries if entry.process.pid in ours]


def _read_entry(path: Path, marker: bytes) -> _Entry | None:
    """None if the process is gone, or somebody else's and hidden."""
    try:
        # The name in parentheses may hold spaces and parentheses itself.
        fields = (path / "stat").read_text(errors="replace").rpartition(")")[2].split()
        ended = fields[0] in ("Z", "X")
        return _Entry(
            process=OneProcess(int(path.name), started=int(fields[19])),
            ended=ended,
            parent=int(fields[1]),
            session=int(fields[3]),
            marked=not ended and marker in (path / "environ").read_bytes().split(b"\0"),
        )
    except (OSError, IndexError):
        return None


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _wait(process: subprocess.Popen[bytes], deadline: float) -> None:
    try:
        process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return
