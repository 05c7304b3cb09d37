"""Rows of a bundle that nobody vouches for: everything that isn't as the study says is named, and nothing crashes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from server.bundle import files, rows
from server.bundle.rows import ExpectedRows, FoundRows, check_rows

COLUMNS = ("id", "text", "topic", "weight")
ROWS = [{"id": str(n), "text": f"text {n}", "topic": "ab"[n % 2], "weight": 1.0} for n in range(4)]


def _expected(**changes: Any) -> ExpectedRows:
    values = {"shards": ("a.parquet",), "columns": COLUMNS, "values": (frozenset("ab"),), "texts": 4}
    return ExpectedRows.model_validate(values | changes)


def _write(
    folder: Path, table: Any = ROWS, lines: Any = ROWS, schema: pa.Schema | None = None, metadata: Any = None
) -> Path:
    schema = schema or pa.schema([*((name, pa.string()) for name in COLUMNS[:-1]), ("weight", pa.float64())])
    schema = schema.with_metadata(metadata)
    with pq.ParquetWriter(folder / "a.parquet", schema, compression="zstd", store_schema=bool(metadata)) as writer:
        writer.write_table(pa.Table.from_pylist(list(table), schema))
    text = lines if isinstance(lines, bytes) else "".join(json.dumps(row) + "\n" for row in lines).encode()
    (folder / files.JSON_LINES).write_bytes(gzip.compress(text))
    return folder


def _with(number: int, **cells: Any) -> list[Mapping[str, Any]]:
    return [row | cells if n == number else row for n, row in enumerate(ROWS)]


def test_honest_rows_are_counted(tmp_path: Path) -> None:
    found = rows._read(_write(tmp_path), _expected())
    assert found == FoundRows(
        problem="",
        counts=((("a",), 2), (("b",), 2)),
        samples=((("a",), "text 0"), (("b",), "text 1"), (("a",), "text 2")),
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (_with(2, id="3"), "row 2 has another id than its place"),
        (_with(1, topic="c"), "row 1 has a value of 'topic' that the study doesn't declare"),
        (_with(1, text=None), "row 1 has an empty cell"),
        (_with(1, weight=None), "row 1 has an empty cell"),
        (_with(1, weight=2.0), "row 3 has another weight"),
        (_with(1, weight=-1.0), "row 1 has a weight that is no number"),
        (_with(1, weight=float("inf")), "row 1 has a weight that is no number"),
        ([row | {"weight": 2.0} for row in ROWS], "the weights add up to 8"),
        (ROWS[:3], "there are 3 rows instead of 4"),
        ([*ROWS, *ROWS[:1]], "there are more rows than 4"),
    ],
)
def test_rows_that_are_alike_in_both_formats_and_wrong_are_named(tmp_path: Path, changed: Any, said: str) -> None:
    assert said in rows._read(_write(tmp_path, changed, changed), _expected()).problem


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (_with(3, text="x"), "row 3 isn't the same in both formats"),
        (ROWS[:3], "data.jsonl.gz ends before row 3"),
        ([*ROWS, *ROWS[:1]], "there are more rows than 4"),
        ([{**row, "site": "north"} for row in ROWS], "row 0 hasn't the columns id, text, topic, weight"),
        ([dict(reversed(row.items())) for row in ROWS], "row 0 hasn't the columns"),
        (b'{"id": "0", "text": "x", "text": "text 0", "topic": "a", "weight": 1.0}\n', "row 0 hasn't the columns"),
        (b"[1, 2]\n", "row 0 isn't a JSON object"),
        (b"3\n", "row 0 isn't a JSON object"),
        (b"\xff\n", "row 0 isn't a JSON object"),
        (b"[" * 100_000 + b"\n", "nests too deeply"),
        (b"x" * (files.MOST_LINE + 1), "row 0 has no end within 16 MiB"),
        (b'{"id": "0"}', "row 0 has no end"),
    ],
)  # fmt: skip
def test_json_lines_that_are_no_rows_are_named(tmp_path: Path, lines: Any, said: str) -> None:
    assert said in rows._read(_write(tmp_path, ROWS, lines), _expected()).problem


@pytest.mark.parametrize(
    "content", [b"", b"no gzip", gzip.compress(b"x" * 100)[:-9], b"\x1f\x8b\x08\x00" + b"\xff" * 50]
)
def test_json_lines_that_do_not_unpack_are_named(tmp_path: Path, content: bytes) -> None:
    _write(tmp_path)
    (tmp_path / files.JSON_LINES).write_bytes(content)
    said = rows._read(tmp_path, _expected()).problem
    assert "can't be unpacked" in said or "ends before row 0" in said


def _more_columns(folder: Path) -> None:
    schema = pa.schema([*((name, pa.string()) for name in COLUMNS[:-1]), ("weight", pa.float64()), ("s", pa.string())])
    _write(folder, [row | {"s": "north"} for row in ROWS], schema=schema)


def _other_types(folder: Path) -> None:
    schema = pa.schema([*((name, pa.large_binary()) for name in COLUMNS[:-1]), ("weight", pa.float32())])
    table = [{k: v.encode() if isinstance(v, str) else v for k, v in row.items()} for row in ROWS]
    _write(folder, table, schema=schema)


def _metadata(folder: Path) -> None:
    _write(folder, metadata={"site": "north"})


def _garbage(folder: Path) -> None:
    _write(folder)
    (folder / "a.parquet").write_bytes(b"PAR1" + b"\xff" * 100 + b"PAR1")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_more_columns, "its columns aren't"),
        (_other_types, "its columns aren't"),
        (_metadata, "its columns aren't"),
        (_garbage, "a.parquet: can't be read as Parquet"),
    ],
)
def test_parquet_of_other_columns_or_none_is_named(tmp_path: Path, change: Callable[[Path], None], said: str) -> None:
    change(tmp_path)
    assert said in rows._read(tmp_path, _expected()).problem


def test_rows_are_read_in_a_process_of_its_own(tmp_path: Path) -> None:
    assert check_rows(_write(tmp_path), _expected()).problem == ""
    assert "row 3 isn't the same" in check_rows(_write(tmp_path, ROWS, _with(3, text="x")), _expected()).problem


def test_a_reader_that_dies_of_what_it_reads_is_a_finding(tmp_path: Path) -> None:
    """A text of 16 MB in 2 kB of Parquet, and a process that may have no more memory than it has."""
    _write(tmp_path, _with(0, text="x" * (files.MOST_LINE)))
    assert (tmp_path / "a.parquet").stat().st_size < 10_000
    assert "made to do harm" in check_rows(tmp_path, _expected(), memory=1 << 20).problem


def test_a_folder_with_modules_of_the_same_names_is_only_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a reader would import from the folder that it is in would be a forger's code."""
    for name in ("gzip.py", "json.py", "pyarrow.py"):
        (tmp_path / name).write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    assert check_rows(_write(tmp_path), _expected()).problem == ""
