"""Rows of a file of documents: Parquet, CSV or JSONL, the last two also gzipped. Private.

No exception raised here quotes a cell, not even by way of its cause: pyarrow's own exceptions do, so they end in this
module. A new file format is one function from a path to rows, and one entry in `FORMATS`.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from common.errors import DataError

BATCH_ROWS = 10_000
_MAX_CSV_CELL = 1 << 24
"""Characters. Python's own limit of 131072 is shorter than some discharge letters."""


class Problem(Enum):
    """Why a row can't be used: a code, and a sentence that never quotes the row."""

    NO_TEXT = "the text is empty"
    NO_CODE = "a code column is empty"
    NO_PATIENT = "the patient column is empty"
    NOT_JSON = "the line isn't a JSON object"
    REPEATED_KEY = "the JSON object has a key twice"
    WRONG_CELLS = "the number of cells differs from the header's"
    BAD_QUOTE = "a quoted cell goes on after its closing quote"
    NOT_UTF8 = "a cell isn't valid UTF-8"
    NOT_ONE_VALUE = "a cell holds a list or an object, not one value"


Row = tuple[Any, ...]
"""Cells in the order of the columns that were asked for; a cell that may hold several values may be a list."""

Columns = Mapping[str, str]
"""Column -> what to do if the file lacks it."""


def rows_of(path: Path, columns: Columns, lists: Collection[str] = ()) -> Iterator[Row | Problem]:
    """Every row of data, in order: its cells, or why it can't be read.

    Parameters
    ----------
    lists
        Columns whose cells may be lists of values.

    Raises
    ------
    DataError
        ``from None`` throughout: what pyarrow, json and gzip raise may quote a cell.
    """
    _check_file(path)
    suffix = format_of(path)
    may_be_list = [column in lists for column in columns]
    try:
        for row in FORMATS[suffix](path, columns):
            yield row if isinstance(row, Problem) else _checked(row, may_be_list)
    except DataError:
        raise
    except PermissionError:
        raise DataError(f"{path}: can't be read: permission denied") from None
    except (pa.ArrowException, OSError, EOFError, zlib.error, ValueError, OverflowError) as cause:
        raise DataError(
            f"{path}: can't be read as {suffix}: the file is damaged or of another format ({type(cause).__name__})"
        ) from None


def read_columns(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """All readable rows of a file as texts (see `as_text`), with the named columns only. Private.

    Raises
    ------
    DataError
        If the file can't be read or a column is missing.
    """
    wanted = dict.fromkeys(columns, "name one of these")
    readable = (row for row in rows_of(path, wanted) if not isinstance(row, Problem))
    return [dict(zip(wanted, map(as_text, row), strict=True)) for row in readable]


def as_text(value: Any) -> str:
    """A cell as text without outer blanks: 4 and 4.0 are '4', true is 'true', nothing is ''."""
    if isinstance(value, str):
        return value.strip()
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float | Decimal) and _is_whole(value):
        return str(int(value))
    return str(value).strip()


def _is_whole(value: float | Decimal) -> bool:
    return value.is_integer() if isinstance(value, float) else value == value.to_integral_value()


def _checked(row: Row, may_be_list: Sequence[bool]) -> Row | Problem:
    """The row with its text decoded, or why it can't be used."""
    if not all(map(_is_flat, row, may_be_list)):
        return Problem.NOT_ONE_VALUE
    try:
        return tuple(_cell(value) for value in row)
    except UnicodeError:
        return Problem.NOT_UTF8


def _is_flat(value: Any, may_be_list: bool) -> bool:
    inner = value if may_be_list and isinstance(value, list) else [value]
    return not any(isinstance(part, list | dict) for part in inner)


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return [_cell(part) for part in value]
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, str) and not value.isascii():
        # JSON's \ud800 passes for a text in Python, and breaks later where the text is written or tokenised.
        value.encode("utf-8")
    return value


def _parquet(path: Path, columns: Columns) -> Iterator[Row | Problem]:
    with pq.ParquetFile(path) as file:
        _require(path, file.schema_arrow.names, columns)
        for batch in file.iter_batches(BATCH_ROWS, columns=list(columns)):
            yield from zip(*(_values(batch.column(name)) for name in columns), strict=True)


def _values(column: Any) -> list[Any]:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_large_list(column.type) or pa.types.is_list(column.type):
        return _lists(column)
    if pa.types.is_temporal(column.type):
        column = column.cast(pa.string())
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        # As bytes: otherwise a cell that isn't UTF-8 fails the whole batch.
        column = column.cast(pa.large_binary())
    values: list[Any] = column.to_pylist()
    return values


def _lists(column: Any) -> list[Any]:
    """Lists by their elements, each read as it would be on its own."""
    bounds, parts = column.offsets.to_pylist(), _values(column.values)
    return [
        parts[start:end] if there else None
        for start, end, there in zip(bounds, bounds[1:], column.is_valid().to_pylist(), strict=False)
    ]


def _csv(path: Path, columns: Columns) -> Iterator[Row | Problem]:
    # The standard reader and not pyarrow's: that one can't number a row that isn't UTF-8, takes all rows
    # after an open quote for one cell, and needs every row to fit a block.
    csv.field_size_limit(max(csv.field_size_limit(), _MAX_CSV_CELL))
    with _opened(path) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        rows = (row for row in _csv_rows(path, csv.reader(text, strict=True)) if row)
        header = _csv_header(path, next(rows, None))
        _require_comma(path, header, columns)
        _require(path, header, columns)
        places = [header.index(column) for column in columns]
        for row in rows:
            if isinstance(row, Problem):
                yield row
            elif len(row) != len(header):
                yield Problem.WRONG_CELLS
            else:
                yield tuple(row[place] for place in places)


def _csv_rows(path: Path, reader: Iterator[list[str]]) -> Iterator[list[str] | Problem]:
    while True:
        try:
            yield next(reader)
        except StopIteration:
            return
        except csv.Error as cause:
            if "expected after" not in str(cause):
                raise DataError(
                    f"{path}: a quote isn't closed, or a cell has more than {_MAX_CSV_CELL} characters; the "
                    "rows after it can't be told apart"
                ) from None
            yield Problem.BAD_QUOTE


def _csv_header(path: Path, row: list[str] | Problem | None) -> list[str]:
    if row is None:
        raise DataError(f"{path}: the file is empty; a header and at least one row are needed")
    if isinstance(row, Problem):
        raise DataError(f"{path}: the header can't be read: {row.value}")
    names = [name.strip() for name in row]
    if not all(map(_is_unicode, names)):
        raise DataError(f"{path}: the header isn't UTF-8 text; save the file as UTF-8")
    return names


def _require_comma(path: Path, header: Sequence[str], columns: Columns) -> None:
    separator = next((mark for mark in ";\t|" if len(header) == 1 and mark in header[0]), None)
    if separator and header[0] not in columns:
        raise DataError(f"{path}: the cells are separated by {separator!r}; a comma is needed")


def _json_lines(path: Path, columns: Columns) -> Iterator[Row | Problem]:
    # Line by line and not by pyarrow: one bad line fails its whole file, 4 and "4" can't share a column, and
    # a text that looks like a date becomes one.
    seen: dict[str, None] = {}
    missing = set(columns)
    lines = objects = 0
    with _opened(path) as stream:
        for line in _lines(stream):
            lines += 1
            row = _json_object(line)
            if isinstance(row, Problem):
                yield row
                continue
            objects += 1
            missing -= row.keys()
            seen |= dict.fromkeys(row) if missing else {}
            yield tuple(row.get(column) for column in columns)
    if not lines:
        raise DataError(f"{path}: the file is empty; at least one JSON object is needed")
    if not objects:
        raise DataError(
            f"{path}: no line is a JSON object; one object per line is needed, without an array around them"
        )
    if missing:
        _require(path, list(seen), columns)


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    for number, line in enumerate(stream):
        visible = line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
        if visible.strip():
            yield visible


def _json_object(line: bytes) -> dict[str, Any] | Problem:
    try:
        row = json.loads(line.decode("utf-8"), object_pairs_hook=_distinct)
    except UnicodeDecodeError:
        return Problem.NOT_UTF8
    except _RepeatedKey:
        return Problem.REPEATED_KEY
    except (ValueError, RecursionError):
        return Problem.NOT_JSON
    return row if isinstance(row, dict) else Problem.NOT_JSON


class _RepeatedKey(Exception):
    """Control flow only: which of two values is meant can't be known."""


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        raise _RepeatedKey
    return row


FORMATS: Mapping[str, Callable[[Path, Columns], Iterator[Row | Problem]]] = {
    ".parquet": _parquet,
    ".csv": _csv,
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_lines,
}
SUFFIXES = (*FORMATS, *(f"{suffix}.gz" for suffix in FORMATS if suffix != ".parquet"))


def format_of(path: Path) -> str:
    """A file's key in `FORMATS`."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _opened(path: Path) -> IO[bytes]:
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    return path.open("rb")


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _require(path: Path, there: Sequence[str], columns: Columns) -> None:
    count = Counter(there)
    for column, fix in columns.items():
        if count[column] > 1:
            raise DataError(f"{path}: column {column!r} is there {count[column]} times; column names must be distinct")
        if not count[column]:
            names = ", ".join(map(repr, there[:20])) + (f" and {len(there) - 20} more" if len(there) > 20 else "")
            raise DataError(f"{path}: column {column!r} is missing; the file has {names or 'no columns'}; {fix}")


def _check_file(path: Path) -> None:
    accepted = ", ".join(SUFFIXES)
    try:
        if path.is_dir():
            raise DataError(f"{path}: is a folder; a file is needed ({accepted})")
        if not path.is_file():
            raise DataError(f"{path}: no such file; a file is needed ({accepted})")
        if not path.name.lower().endswith(SUFFIXES):
            raise DataError(f"{path}: {path.suffix!r} isn't a known kind of file; {accepted} are accepted")
        if path.stat().st_size == 0:
            raise DataError(f"{path}: the file is empty; at least one document is needed")
    except OSError as cause:
        raise DataError(f"{path}: can't be read: {cause.strerror}") from None
