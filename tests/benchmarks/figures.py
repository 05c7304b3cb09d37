"""What a benchmark has measured so far, in a file: a run that was killed goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any


class Figures:
    """Figures of one benchmark, one JSON object a line. Bound to the code and libraries that were measured.

    Parameters
    ----------
    name
        Of the benchmark.
    modules
        Whose code the figures depend on: another code begins another file.
    size
        Of what is measured.
    """

    def __init__(self, name: str, modules: Iterable[ModuleType], size: str) -> None:
        self._name = name
        digest = hashlib.sha256(f"{size} {[version(name) for name in ('torch', 'transformers', 'peft')]}".encode())
        for module in modules:
            digest.update(Path(str(module.__file__)).read_bytes())
        folder = Path(os.environ.get("FEDCORPUS_BENCH_FIGURES", tempfile.gettempdir()))
        self.file = folder / f"fedcorpus-{name}-{digest.hexdigest()[:12]}.jsonl"
        self._lines: list[dict[str, Any]] = []
        if self.file.is_file():
            self._lines = [json.loads(line) for line in self.file.read_text().splitlines()]
        print(f"{name}: figures in {self.file}, {len(self._lines)} so far", file=sys.stderr)

    def find(self, kind: str, **setting: str) -> list[dict[str, Any]]:
        """Figures of one kind, in the order they were made."""
        return [line for line in self._lines if line["kind"] == kind and line["setting"] == setting]

    def add(self, kind: str, setting: dict[str, str], **values: Any) -> None:
        """Write one figure at once."""
        line = {"kind": kind, "setting": setting, **values}
        self._lines.append(line)
        with self.file.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        print(f"{self._name}: {' '.join(setting.values())} {kind} {values}", file=sys.stderr, flush=True)
