"""What else is known of a step's result, for the raw numbers: name -> number."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from server.experiments.cache import Made
from server.workspace import write_atomically

_FILE = "notes.json"


def write_notes(folder: Path, notes: Mapping[str, float]) -> None:
    """Beside a result; finite numbers only."""
    write_atomically(folder / _FILE, json.dumps(dict(notes), indent=1, allow_nan=False).encode())


def read_notes(results: Iterable[Made]) -> dict[str, float]:
    """Of several results together."""
    notes: dict[str, float] = {}
    for made in results:
        if (made.folder / _FILE).exists():
            notes |= json.loads((made.folder / _FILE).read_bytes())
    return notes
