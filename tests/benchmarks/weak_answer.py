"""The whole answer of a weak site: 15,000 medical texts, 5,000 candidates, in an environment without torch.

With the static embedder, and with MiniLM as ONNX where the environment has onnxruntime; once with nothing kept, once
over documents that were embedded before. Documents are real abstracts (some 250 tokens) and, to make up the number,
reviews; candidates are halves of others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.study import Study
from tests.benchmarks.bars import Bar
from tests.benchmarks.weak_folder import MEDICAL_TEXTS, minilm, write_weak_folder

DOCUMENTS, CANDIDATES, CODES = 15_000, 5_000, 5
WEAK = Path(__file__).parents[2] / ".venv-weak" / "bin" / "python"
STATIC_SECONDS, ONNX_SECONDS, MOST_MB = 60.0, 600.0, 600.0


def run() -> Iterator[Bar]:
    """Measure every embedder that is there, print shares, hold the bars."""
    if not all(file.is_file() for file in MEDICAL_TEXTS):
        sys.exit("weak-answer: the medical texts aren't beside this checkout (shared/data)")
    yield from _bars("static", "wordllama", {}, WEAK if WEAK.is_file() else Path(sys.executable), STATIC_SECONDS)
    for name, embedder, local in minilm():
        yield from _bars(name, embedder, local, Path(sys.executable), ONNX_SECONDS)


def _bars(name: str, embedder: str, local: dict[str, Path], python: Path, limit: float) -> Iterator[Bar]:
    with tempfile.TemporaryDirectory() as folder:
        write_weak_folder(Path(folder), embedder, local, DOCUMENTS, CANDIDATES, CODES)
        first = answered(Path(folder), python)
        _show(name, first)
        yield Bar(f"weak-answer-{name}-seconds", first["seconds"], limit)
        yield Bar(f"weak-answer-{name}-peak-mb", first["peak_mb"], MOST_MB)
        again = _another_run(Path(folder))
        _show(f"{name}, another study over the same documents", answered(again, python))


def answered(folder: Path, python: Path) -> dict[str, Any]:
    """What one answer took, in a process of its own; see `tests.benchmarks.weak_site`."""
    done = subprocess.run(
        [str(python), str(Path(__file__).with_name("weak_site.py")), str(folder)],
        capture_output=True, text=True, check=False, cwd=folder, env=dict(os.environ) | {"PYTHONPATH": ""},
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"weak-answer: {python} ended with {done.returncode}: {done.stderr[-2000:]}")
    taken: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return taken


def _another_run(folder: Path) -> Path:
    """The same site asked by another study."""
    study = json.loads((folder / "study.json").read_text()) | {"name": "another"}
    (folder / "study.json").write_text(Study.model_validate(study).canonical)
    return folder


def _show(name: str, taken: dict[str, Any]) -> None:
    whole = taken["seconds"]
    print(f"\n{name}: {DOCUMENTS} x {CANDIDATES}, {whole:.1f} s, peak {taken['peak_mb']:.0f} MB")
    for stage, (wall, cpu) in sorted(taken["stages"].items(), key=lambda item: -item[1][0]):
        print(f"  {stage:<30} {wall:8.2f} s  {wall / whole:6.1%}   {cpu:8.2f} CPU s", flush=True)
