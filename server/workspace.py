"""The run folder: every artefact's path is an attribute here, and nothing else joins paths."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Workspace:
    """Folder of one run at the coordinator. Everything in it is public or already noised."""

    root: Path

    @property
    def study(self) -> Path:
        """The study in canonical JSON."""
        return self.root / "study.json"

    @property
    def identity(self) -> Path:
        """The run's name, by which sites know it (JSON)."""
        return self.root / "run.json"

    @property
    def checkpoint(self) -> Path:
        """Where the run stands after the last finished round (npz)."""
        return self.root / "checkpoint.npz"

    @property
    def launch(self) -> Path:
        """How the run was started on this machine (JSON)."""
        return self.root / "launch.json"

    @property
    def lock(self) -> Path:
        """Held while the run goes on."""
        return self.root / ".lock"

    @property
    def progress(self) -> Path:
        """Append-only progress events, one JSON object a line."""
        return self.root / "progress.jsonl"

    @property
    def adapter(self) -> Path:
        """The averaged adapter after the last finished round (peft's layout)."""
        return self.root / "adapter"

    @property
    def profiles(self) -> Path:
        """Noisy profiles by site (JSON)."""
        return self.root / "profiles.json"

    @property
    def pool(self) -> Path:
        """Candidate pool (JSONL)."""
        return self.root / "pool.jsonl"

    @property
    def ballots(self) -> Path:
        """Each weak site's noisy ballot (npz)."""
        return self.root / "ballots.npz"

    @property
    def corpus_jsonl(self) -> Path:
        """The corpus as JSON lines."""
        return self.root / "corpus.jsonl"

    @property
    def corpus_parquet(self) -> Path:
        """The corpus as Parquet."""
        return self.root / "corpus.parquet"

    @property
    def summary_json(self) -> Path:
        """The summary for programs."""
        return self.root / "summary.json"

    @property
    def summary_text(self) -> Path:
        """The summary for people (Markdown)."""
        return self.root / "SUMMARY.md"

    @property
    def quality(self) -> Path:
        """What an evaluation of the corpus found (JSON); there only if it was evaluated."""
        return self.root / "evaluation.json"

    @property
    def report(self) -> Path:
        """The report for people (HTML, one file)."""
        return self.root / "report.html"

    @property
    def generation(self) -> Path:
        """Texts as they are generated, while the run needs them."""
        return self.root / "generation"

    @property
    def generations(self) -> Path:
        """Folders of the texts that were made later, in the order in which they were begun (JSON)."""
        return self.root / "generations.json"

    def more(self, texts: int) -> Path:
        """Where so many more texts go unless somebody says otherwise."""
        return self.root / f"more-{texts}"

    def new_federation(self) -> Path:
        """Folder for logs, certificates and databases of a federation on this machine: one for every attempt."""
        taken = len(list(self.root.glob("federation*")))
        return self.root / ("federation" if not taken else f"federation-{taken + 1}")

    def create(self) -> Workspace:
        """Make the folder."""
        self.root.mkdir(parents=True, exist_ok=True)
        return self


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file, durably, so that a reader, or a crash, sees the old content or the new and nothing between."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a new folder, then put it in ``folder``'s place; a crash leaves a whole one behind."""
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    old = building.with_name(f"{building.name}-old")
    try:
        write(building)
        if folder.exists():
            folder.rename(old)
        building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
