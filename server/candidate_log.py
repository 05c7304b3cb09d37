"""Generated texts as they come, on disk: a generation that was killed goes on after the last of them.

JSON lines: first what is being generated, then one line a text, kept or not, in the order in which they were asked for.
All of it is synthetic text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """What became of one request.

    Attributes
    ----------
    code
        Index of its control code.
    text
        The text if it was kept.
    dropped
        Why it wasn't, else empty.
    cut
        Whether the length limit cut it.
    """

    code: int
    text: str = ""
    dropped: str = ""
    cut: bool = False


class CandidateLog:
    """Outcomes in a file. Use as a context manager; read what is there with `earlier`, then `add`.

    Lines of another generation are overwritten, and so is a last line that was broken off.

    Parameters
    ----------
    path
        Of the file.
    generation
        What makes a generation the same one, as JSON: its study, its model, its place.
    """

    def __init__(self, path: Path, generation: dict[str, Any]) -> None:
        self._path = path
        self._head = _line({"generation": generation})

    def __enter__(self) -> CandidateLog:
        self._file = self._path.open("a+b")
        self._file.seek(0)
        if self._file.readline() != self._head:
            self._restart()
        self._end = self._file.tell()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def earlier(self) -> Iterator[Outcome]:
        """Outcomes of earlier attempts, in order; ends where a line can't be read."""
        self._file.seek(self._end)
        while (line := self._file.readline()).endswith(b"\n"):
            try:
                outcome = Outcome(**json.loads(line))
            except (ValueError, TypeError):
                break
            self._end = self._file.tell()
            yield outcome
        self._file.truncate(self._end)

    def add(self, outcome: Outcome) -> None:
        """Append one; it survives the end of this process at once."""
        row = {name: value for name, value in vars(outcome).items() if value or name == "code"}
        self._file.write(_line(row))
        self._file.flush()

    def remove(self) -> None:
        """Delete the file: what was kept is elsewhere now."""
        self._path.unlink(missing_ok=True)

    def _restart(self) -> None:
        self._file.truncate(0)
        self._file.write(self._head)
        self._file.flush()


def _line(value: dict[str, Any]) -> bytes:
    # In ASCII: whatever a text holds, no byte of it ends a line.
    return json.dumps(value).encode() + b"\n"
