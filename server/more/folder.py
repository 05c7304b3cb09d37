"""The folder of a generation: Parquet files of texts, and beside them where it stands. Everything in it is synthetic.

A file is written under another name and renamed when it is whole. The state that counts it follows; a file beyond the
state is made again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from common.codes import ControlCodes
from common.configuration import first_problem
from common.errors import CheckpointError, DataError
from server.corpus import OWN_COLUMNS, attribute_columns
from server.generation import SyntheticText
from server.more.state import Settings, State
from server.workspace import Workspace, write_atomically

_AT_ONCE = 2_000
"""Rows that are in memory when texts are read."""


@dataclass(frozen=True)
class Folder:
    """Paths of a generation."""

    root: Path

    @property
    def state(self) -> Path:
        """Where it stands (JSON)."""
        return self.root / "generation.json"

    @property
    def log(self) -> Path:
        """Texts of the shard that is being made (JSON lines)."""
        return self.root / ".candidates.jsonl"

    def file(self, number: int) -> Path:
        """One of the Parquet files, counted from 0."""
        return self.root / f"part-{number:05d}.parquet"


def read_state(folder: Folder) -> State | None:
    """Where the generation in a folder stands; None if the folder is empty, or isn't there.

    Raises
    ------
    CheckpointError
        If there is something else in it.
    """
    if not folder.state.exists():
        if folder.root.exists() and not _empty(folder.root):
            raise CheckpointError(
                f"{folder.root}: isn't empty and no generation was begun in it; give a new folder, or one that "
                "'fedcorpus generate' began"
            )
        return None
    try:
        return State.model_validate_json(folder.state.read_bytes())
    except ValidationError as cause:
        raise CheckpointError(f"{folder.state}: the generation can't go on: {first_problem(cause)}") from cause


def check_same(folder: Folder, state: State, settings: Settings) -> None:
    """Refuse to go on with another generation.

    Raises
    ------
    CheckpointError
        Naming what differs.
    """
    words = {
        "run_id": "the run",
        "study_sha256": "the study",
        "adapter_sha256": "the adapter",
        "texts": "the number of texts",
    }
    for name, what in words.items():
        begun, asked = getattr(state.settings, name), getattr(settings, name)
        if begun != asked:
            raise CheckpointError(
                f"{folder.root}: was begun with another generation: {what} is {begun!r} there and {asked!r} here; give "
                "another --out"
            )


def write_state(folder: Folder, state: State) -> None:
    """Replace the state, durably."""
    write_atomically(folder.state, state.model_dump_json().encode())


def write_file(path: Path, codes: ControlCodes, texts: Sequence[SyntheticText], ids: Sequence[str]) -> None:
    """Write texts as Parquet (zstd), whole and durably or not at all. Its columns are those of a run's corpus."""
    attributes = attribute_columns(codes, OWN_COLUMNS)
    values = list(zip(*(codes.combinations[text.code] for text in texts), strict=True))
    columns = {
        "id": ids,
        "text": [text.text for text in texts],
        **dict(zip(attributes, values, strict=True)),
        "origin": ["top-up"] * len(texts),
    }
    table = pa.table({name: pa.array(cells, pa.string()) for name, cells in columns.items()})
    temporary = path.with_name(f".{path.name}.tmp")
    pq.write_table(table, temporary, compression="zstd")
    _sync(temporary)
    temporary.replace(path)
    _sync(path.parent)


def read_texts(folder: Folder, files: int, codes: ControlCodes) -> Iterator[SyntheticText]:
    """Texts of the first files, in little memory.

    Raises
    ------
    DataError
        If a file is missing or damaged.
    """
    columns = ["text", *attribute_columns(codes, OWN_COLUMNS)]
    for number in range(files):
        path = folder.file(number)
        try:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(_AT_ONCE, columns=columns):
                    for text, *values in zip(*(batch[column].to_pylist() for column in columns), strict=True):
                        yield SyntheticText(text, _code(path, codes, tuple(values)))
        except (OSError, pa.ArrowException, KeyError) as cause:
            raise DataError(f"{path}: can't be read ({cause}); the generation can't go on without it") from cause


def register(run: Workspace, folder: Folder) -> int:
    """Which generation of a run a folder has, counted from 1; a new one if it had none. Call it while the run is held.

    Raises
    ------
    CheckpointError
        If the run's list of them is damaged.
    """
    folders = generations(run)
    place = str(folder.root.resolve())
    if place not in folders:
        folders.append(place)
        write_atomically(run.generations, json.dumps(folders, indent=1).encode())
    return folders.index(place) + 1


def generations(run: Workspace) -> list[str]:
    """Folders of all generations of a run that were ever begun, in their order."""
    if not run.generations.exists():
        return []
    try:
        folders = json.loads(run.generations.read_bytes())
    except ValueError as cause:
        raise CheckpointError(f"{run.generations}: not JSON: {cause}") from cause
    if not isinstance(folders, list) or not all(isinstance(folder, str) for folder in folders):
        raise CheckpointError(f"{run.generations}: not a list of folders")
    return folders


def _code(path: Path, codes: ControlCodes, values: tuple[str, ...]) -> int:
    code = codes.index(values)
    if code is None:
        raise DataError(f"{path}: has attribute values that the study doesn't declare")
    return code


def _empty(root: Path) -> bool:
    # A generation that is stopped before its first state leaves hidden files.
    return root.is_dir() and all(path.name.startswith(".") for path in root.iterdir())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
