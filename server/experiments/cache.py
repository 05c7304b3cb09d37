"""Every step of a cell is made once: its result lies under a hash of everything that it depends on.

    made = cache.make(step, earlier)        # makes it, or finds it
    made.folder, made.sha256, made.seconds

A result is a folder that appears whole or not at all. What a step depends on is what it says itself (`Step.inputs`),
and the code that makes it: a result of other code is made anew, unless the cache is told to trust it. Results hold the
noise that was drawn when they were made; that has no seed, so what is made again differs.

The cache is for public text: it holds texts, vectors and, of the sites, ledgers and documents.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import UserError
from server.workspace import replace_folder, write_atomically

log = logging.getLogger("fedcorpus.experiment")

FORMAT = 1
_PACKAGES = Path(__file__).parents[2]
_FACTS = "step.json"


class Facts(BaseModel):
    """``step.json``: what is known of a result."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    rate: str = Field(description="Results of one kind and rate take alike long for a unit of work.")
    units: float = Field(description="Units of work.")
    seconds: float = Field(description="How long it took.")
    code: str = Field(description="Hash of the code that made it.")
    sha256: str = Field(description="Hash of what was made.")
    inputs: dict[str, Any] = Field(description="What it depends on.")


@dataclass(frozen=True)
class Made:
    """A result: its folder, the hash of what is in it, and how long it took."""

    folder: Path
    sha256: str
    seconds: float


OnProgress = Callable[[int, int], None]
"""Called with how much of a step is done, and how much there is."""

Earlier = Mapping[str, Made]
"""Results of a cell's earlier steps, by the name of the step."""


class Step(ABC):
    """One step of a cell.

    Attributes
    ----------
    kind
        What sort of step; results of a kind lie together.
    sources
        Files and folders of this project's code that its result depends on.
    name
        What later steps of the cell call it.
    rate
        Steps of one kind and rate take alike long for a unit of work.
    progress
        Called while it is made, if it takes long.
    """

    kind: ClassVar[str]
    sources: ClassVar[tuple[str, ...]]
    progress: OnProgress = staticmethod(lambda _done, _total: None)

    @property
    def name(self) -> str:
        """What later steps of the cell call it: unless it is there several times, its kind."""
        return self.kind

    @property
    def rate(self) -> str:
        """Unless it says else, all of a kind take alike long for a unit."""
        return ""

    @property
    def units(self) -> float:
        """Units of work."""
        return 1.0

    @abstractmethod
    def inputs(self, earlier: Earlier) -> dict[str, Any]:
        """Everything the result depends on but code, as JSON values."""

    @abstractmethod
    def make(self, earlier: Earlier, out: Path, work: Path) -> None:
        """Write the result into ``out``. What is in ``work`` is there again after a kill."""


class CacheInUseError(UserError):
    """Another experiment is at work in a cache."""


class Cache:
    """Results in a folder.

    Parameters
    ----------
    trusting
        Whether a result of other code counts.

    Raises
    ------
    UserError
        If the folder can't be written.
    """

    def __init__(self, folder: Path, *, trusting: bool = False) -> None:
        self._folder, self._trusting = folder, trusting
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as cause:
            raise UserError(
                f"{folder}: can't be made: {cause.strerror}; a folder that can be written is needed"
            ) from cause

    @property
    def homes(self) -> Path:
        """Where sites have their documents and ledgers."""
        return self._folder / "sites"

    @property
    def written(self) -> Path:
        """Where texts are kept that generators wrote beside their pools."""
        return self._folder / "written"

    @property
    def vectors(self) -> Path:
        """Where vectors of texts are kept."""
        return self._folder / "vectors"

    def find(self, step: Step, earlier: Earlier) -> Made | None:
        """A step's result, if it is there."""
        folder = self._place(step, earlier)
        facts = _facts(folder)
        if facts is None or (facts.code != code_sha256(step.sources) and not self._trusting):
            return None
        return Made(folder, facts.sha256, facts.seconds)

    def make(self, step: Step, earlier: Earlier) -> Made:
        """A step's result, made if it isn't there."""
        if found := self.find(step, earlier):
            return found
        inputs, place = step.inputs(earlier), self._place(step, earlier)
        work = self._folder / "work" / place.name
        work.mkdir(parents=True, exist_ok=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        spent = _spent(work)
        start = time.monotonic()

        def fill(out: Path) -> None:
            try:
                step.make(earlier, out, work)
            finally:
                write_atomically(work / "seconds", f"{spent + time.monotonic() - start:.3f}".encode())
            facts = Facts(
                kind=step.kind,
                rate=step.rate,
                units=step.units,
                seconds=round(_spent(work), 3),
                code=code_sha256(step.sources),
                sha256=folder_sha256(out),
                inputs=inputs,
            )
            write_atomically(out / _FACTS, facts.model_dump_json(indent=1).encode())

        replace_folder(place, fill)
        shutil.rmtree(work)
        facts = _facts(place)
        if facts is None:
            raise UserError(f"{place}: vanished while it was made; is something else at work in the cache?")
        return Made(place, facts.sha256, facts.seconds)

    def seconds_a_unit(self, kind: str, rate: str) -> float | None:
        """How long a unit of work took, over all results; None if there are none."""
        known = [f for f in map(_facts, (self._folder / kind).glob("[!.]*")) if f is not None and f.rate == rate]
        units = sum(f.units for f in known)
        return sum(f.seconds for f in known) / units if units else None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the cache: two experiments at once would both make what they share.

        Raises
        ------
        CacheInUseError
            If another process holds it.
        """
        with (self._folder / ".lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as cause:
                raise CacheInUseError(
                    f"{self._folder}: another experiment is at work in this cache; wait, or name another with --cache"
                ) from cause
            yield

    def key(self, step: Step, earlier: Earlier) -> str:
        """What a step's result lies under."""
        content = json.dumps({"format": FORMAT, "kind": step.kind, "inputs": step.inputs(earlier)}, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:24]

    def _place(self, step: Step, earlier: Earlier) -> Path:
        return self._folder / step.kind / self.key(step, earlier)


def folder_sha256(folder: Path) -> str:
    """Hash of all files in a folder, with their names."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        for part in (file.relative_to(folder).as_posix().encode(), file.read_bytes()):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


@cache
def code_sha256(sources: tuple[str, ...]) -> str:
    """Hash of Python files, named from the folder that holds the packages. Read once: it is what this process runs."""
    digest = hashlib.sha256()
    for source in sources:
        path = _PACKAGES / source
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _facts(folder: Path) -> Facts | None:
    try:
        return Facts.model_validate_json((folder / _FACTS).read_bytes())
    except (OSError, ValidationError):
        return None


def _spent(work: Path) -> float:
    """Seconds that earlier attempts took."""
    try:
        return float((work / "seconds").read_text())
    except (OSError, ValueError):
        return 0.0
