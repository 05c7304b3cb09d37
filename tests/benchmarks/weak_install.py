"""A weak hospital's installation from a local package index: seconds, disk, and what isn't in it.

Packages are fetched first, which isn't timed: how fast a hospital's line is isn't ours to measure.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.bars import Bar
from tests.benchmarks.weak_answer import CANDIDATES, CODES, DOCUMENTS, MOST_MB, answered
from tests.benchmarks.weak_folder import MEDICAL_TEXTS, write_weak_folder

ROOT = Path(__file__).parents[2]
MOST_SECONDS, MOST_GB = 60.0, 1.1
HEAVY = {"torch", "transformers", "peft", "opacus", "sentence-transformers", "tensorflow", "jax"}


def run() -> Iterator[Bar]:
    """Install afresh, without and with ONNX; then answer in the first one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheels = folder / "wheels"
        _pip(sys.executable, "wheel", "--no-deps", "-w", str(wheels), str(ROOT))
        for extra in ("", "onnx"):
            wanted = f"fedcorpus[{extra}]" if extra else "fedcorpus"
            _pip(sys.executable, "download", "-d", str(wheels), "--find-links", str(wheels), *_pins(), wanted)
            python, seconds = _installed(folder / f"env-{extra}", wheels, wanted)
            gigabytes = _bytes(folder / f"env-{extra}") / 1e9
            names = _distributions(python)
            print(f"{wanted}: {seconds:.1f} s, {gigabytes:.3f} GB, {len(names)} packages", flush=True)
            yield Bar(f"weak-install{'-' * bool(extra)}{extra}-seconds", seconds, MOST_SECONDS)
            yield Bar(f"weak-install{'-' * bool(extra)}{extra}-gigabytes", gigabytes, MOST_GB)
            yield Bar(f"weak-install{'-' * bool(extra)}{extra}-heavy-packages", len(names & HEAVY), 0)
        if all(file.is_file() for file in MEDICAL_TEXTS):
            site = folder / "site"
            site.mkdir()
            write_weak_folder(site, "wordllama", {}, DOCUMENTS, CANDIDATES, CODES)
            taken = answered(site, folder / "env-" / "bin" / "python")
            print(f"an answer there: {taken['seconds']:.1f} s, peak {taken['peak_mb']:.0f} MB")
            yield Bar("weak-install-peak-mb", taken["peak_mb"], MOST_MB)


def _installed(environment: Path, wheels: Path, wanted: str) -> tuple[str, float]:
    """(python, seconds) of a new environment with ``wanted`` in it."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = str(environment / "bin" / "python")
    _pip(python, "install", "--no-index", "--find-links", str(wheels), *_pins(), wanted)
    return python, time.perf_counter() - start


def _pip(python: str, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", "-qqq", "--disable-pip-version-check", *arguments], check=True)


def _pins() -> tuple[str, str]:
    return "-c", str(ROOT / "deploy" / "constraints.txt")


def _distributions(python: str) -> set[str]:
    listed = subprocess.run([python, "-m", "pip", "list", "--format", "json"], check=True, capture_output=True)
    return {row["name"].lower() for row in json.loads(listed.stdout)}


def _bytes(folder: Path) -> int:
    """On the disk, in blocks."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))
