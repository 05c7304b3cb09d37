"""What was measured, and what else is known of a step's result, for the raw numbers: name -> number."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from server.experiments.cache import Made
from server.workspace import write_atomically

_NUMBERS, _NOTES = "numbers.json", "notes.json"


def write_numbers(folder: Path, numbers: Mapping[str, float]) -> None:
    """What tables show; finite numbers only."""
    _write(folder / _NUMBERS, numbers)


def write_notes(folder: Path, notes: Mapping[str, float]) -> None:
    """Privacy, noise and sizes; finite numbers only."""
    _write(folder / _NOTES, notes)


def read_numbers(results: Iterable[Made]) -> dict[str, float]:
    """Of several results together."""
    return _read(results, _NUMBERS)


def read_notes(results: Iterable[Made]) -> dict[str, float]:
    """Of several results together."""
    return _read(results, _NOTES)


def _write(path: Path, numbers: Mapping[str, float]) -> None:
    write_atomically(path, json.dumps(dict(numbers), indent=1, allow_nan=False).encode())


def _read(results: Iterable[Made], name: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for made in results:
        if (made.folder / name).exists():
            found |= json.loads((made.folder / name).read_bytes())
    return found
