"""The rows of a bundle that nobody vouches for: are both formats the same rows, and such as the study declares?

A file may be made to do harm: a few kilobytes that unpack to terabytes, or that a reader's C++ falls over. So reading
goes on in a process of its own with little memory, row by row, and however that ends is a finding, not a crash:

    check_rows(folder, expected).problem        # "" or the first thing that is wrong
"""

from __future__ import annotations

import gzip
import json
import math
import resource
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field

from server.bundle.files import JSON_LINES, MOST_LINE, SAMPLE_CHARACTERS, sample_rows
from server.corpus import text_id
from server.markdown import excerpt

MEMORY = 2 << 30
"""Address space of the reading process, of which an honest bundle needs a quarter."""

_AT_ONCE = 64
_TOLERANCE = 1e-6


class ExpectedRows(BaseModel):
    """What a bundle's other files say of its rows."""

    model_config = ConfigDict(frozen=True)

    shards: tuple[str, ...] = Field(description="Paths of the Parquet files in the bundle.")
    columns: tuple[str, ...] = Field(description="Columns: id, text, attributes, weight.")
    values: tuple[frozenset[str], ...] = Field(description="Values that each attribute may take.")
    texts: int = Field(description="Number of rows.")


class FoundRows(BaseModel):
    """What the rows are. Empty but for the problem if there is one."""

    model_config = ConfigDict(frozen=True)

    problem: str = Field(description="The first thing that is wrong; empty if nothing is.")
    counts: tuple[tuple[tuple[str, ...], int], ...] = Field(default=(), description="Values of a code, and its rows.")
    samples: tuple[tuple[tuple[str, ...], str], ...] = Field(
        default=(), description="Values and the text's beginning, of the rows that the card shows."
    )


class _Wrong(Exception):
    """What is wrong with the rows; never quotes a text."""


def check_rows(folder: Path, expected: ExpectedRows, memory: int = MEMORY) -> FoundRows:
    """Read a bundle's rows, and compare them, in ``memory`` bytes. Whatever is in the files, this returns."""
    # -P: the folder one happens to be in, perhaps the bundle itself, is no place to import from.
    command = [sys.executable, "-P", "-m", "server.bundle.rows", str(folder.resolve()), str(memory)]
    done = subprocess.run(command, input=expected.model_dump_json().encode(), capture_output=True, check=False)
    try:
        if done.returncode == 0:
            return FoundRows.model_validate_json(done.stdout)
    except ValueError:
        pass
    ended = f"its texts can't be read: the reader ended with {done.returncode}"
    return FoundRows(problem=f"{ended}; they are damaged, or made to do harm")


def main() -> None:
    """Entry of the reading process."""
    memory = int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    # Arrow's other allocators reserve address space that isn't used.
    pa.set_memory_pool(pa.system_memory_pool())
    expected = ExpectedRows.model_validate_json(sys.stdin.buffer.read())
    sys.stdout.write(_read(Path(sys.argv[1]), expected).model_dump_json())


def _read(folder: Path, expected: ExpectedRows) -> FoundRows:
    try:
        return _compared(folder, expected)
    except _Wrong as wrong:
        problem = str(wrong)
    except MemoryError:
        problem = "its texts take more memory to read than any honest ones; they are made to do harm"
    except RecursionError:
        problem = f"{JSON_LINES}: a row nests too deeply"
    return FoundRows(problem=problem)


def _compared(folder: Path, expected: ExpectedRows) -> FoundRows:
    weights: dict[tuple[str, ...], float] = {}
    counts: Counter[tuple[str, ...]] = Counter()
    samples, shown = [], sample_rows(expected.texts)
    total, count = 0.0, 0
    for number, (one, other) in enumerate(
        zip_longest(_parquet_rows(folder, expected), _json_rows(folder / JSON_LINES, expected))
    ):
        if number == expected.texts:
            raise _Wrong(f"there are more rows than {expected.texts}")
        if one is None or other is None:
            raise _Wrong(f"{'Parquet' if one is None else JSON_LINES} ends before row {number}, the other goes on")
        if one != other:
            raise _Wrong(f"row {number} isn't the same in both formats")
        _check_row(number, one, expected)
        codes, weight = tuple(one[2:-1]), one[-1]
        if weights.setdefault(codes, weight) != weight:
            raise _Wrong(f"row {number} has another weight than the row before it of the same code")
        total, count = total + weight, number + 1
        counts[codes] += 1
        if number in shown:
            samples.append((codes, excerpt(one[1], SAMPLE_CHARACTERS)))
    if count < expected.texts:
        raise _Wrong(f"there are {count} rows instead of {expected.texts}")
    if not math.isclose(total, count, rel_tol=_TOLERANCE):
        raise _Wrong(f"the weights add up to {total:g}; they should to the number of rows, {count}")
    return FoundRows(problem="", counts=tuple(counts.items()), samples=tuple(samples))


def _check_row(number: int, row: list[Any], expected: ExpectedRows) -> None:
    if not all(isinstance(value, str) for value in row[:-1]) or not isinstance(row[-1], float):
        raise _Wrong(f"row {number} has an empty cell, or one of another type than its column")
    if row[0] != text_id(number, expected.texts):
        raise _Wrong(f"row {number} has another id than its place")
    for column, value, values in zip(expected.columns[2:-1], row[2:-1], expected.values, strict=True):
        if value not in values:
            raise _Wrong(f"row {number} has a value of {column!r} that the study doesn't declare")
    if not (math.isfinite(row[-1]) and row[-1] >= 0):
        raise _Wrong(f"row {number} has a weight that is no number of 0 or more")


def _parquet_rows(folder: Path, expected: ExpectedRows) -> Iterator[list[Any]]:
    types = [*(pa.string() for _ in expected.columns[:-1]), pa.float64()]
    schema = pa.schema(list(zip(expected.columns, types, strict=True)))
    for shard in expected.shards:
        try:
            # As dictionaries: a text that is repeated a million times takes its memory once.
            with pq.ParquetFile(folder / shard, read_dictionary=list(expected.columns[:-1])) as file:
                # Metadata would say more: that pandas has to hide a column, for one.
                if file.schema_arrow.metadata or not _plain(file.schema_arrow).equals(schema):
                    raise _Wrong(f"{shard}: its columns aren't {', '.join(expected.columns)} and nothing else")
                for batch in file.iter_batches(_AT_ONCE, use_threads=False):
                    for row in range(batch.num_rows):
                        yield [column[row].as_py() for column in batch.columns]
        except (pa.ArrowException, OSError, UnicodeDecodeError) as cause:
            if isinstance(cause, MemoryError):
                raise
            raise _Wrong(f"{shard}: can't be read as Parquet ({type(cause).__name__})") from cause


def _plain(schema: pa.Schema) -> pa.Schema:
    return pa.schema([(f.name, f.type.value_type if pa.types.is_dictionary(f.type) else f.type) for f in schema])


def _json_rows(file: Path, expected: ExpectedRows) -> Iterator[list[Any]]:
    try:
        with gzip.open(file) as opened:
            number = 0
            while line := opened.readline(MOST_LINE):
                if len(line) == MOST_LINE or not line.endswith(b"\n"):
                    raise _Wrong(f"{JSON_LINES}: row {number} has no end within {MOST_LINE >> 20} MiB")
                yield _values(line, number, expected)
                number += 1
    except (OSError, EOFError, zlib.error) as cause:
        raise _Wrong(f"{JSON_LINES}: can't be unpacked ({type(cause).__name__})") from cause


def _values(line: bytes, number: int, expected: ExpectedRows) -> list[Any]:
    try:
        # As pairs: of a name that is there twice, readers disagree which one counts.
        pairs = json.loads(line.decode("utf-8"), object_pairs_hook=list)
        if [name for name, _ in pairs] != list(expected.columns):
            raise _Wrong(f"{JSON_LINES}: row {number} hasn't the columns {', '.join(expected.columns)}")
    except (ValueError, TypeError) as cause:
        raise _Wrong(f"{JSON_LINES}: row {number} isn't a JSON object of the columns") from cause
    return [value for _, value in pairs]


if __name__ == "__main__":
    main()
