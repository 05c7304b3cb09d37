"""A site's documents: read once through pyarrow, mapped to control codes and privacy units. Private.

Malformed rows are told to the operator by row number and reason, never by content; rows whose values the study doesn't
declare are counted. Neither is sent anywhere.
"""

from __future__ import annotations

import gzip
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from common.errors import DataError
from common.site.config import Site
from common.study import Study

log = logging.getLogger("fedcorpus.site")

BATCH_ROWS = 10_000

SUFFIXES = (".parquet", ".csv", ".csv.gz", ".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".json", ".json.gz")


class Problem(Enum):
    """Why a row can't be used. The reason never quotes the row."""

    NO_TEXT = "the text is empty"
    NO_CODE = "a code column is empty"
    NO_PATIENT = "the patient column is empty"
    NOT_JSON = "the line isn't a JSON object"
    WRONG_CELLS = "the number of cells differs from the header's"


@dataclass(frozen=True)
class RowProblem:
    """A malformed row: its number (1 is the first row of data) and the reason."""

    row: int
    reason: Problem


@dataclass(frozen=True, repr=False)
class Documents:
    """A site's documents. Private: ``repr`` shows sizes only.

    Attributes
    ----------
    texts
        One text per document.
    codes
        Code index of each document, int32 ``(documents,)``.
    units
        Privacy unit of each document, int32 ``(documents,)``, numbered from 0 in order of appearance.
    problems
        Malformed rows that were left out.
    undeclared
        Number of rows left out because the study doesn't declare one of their values.
    """

    texts: tuple[str, ...]
    codes: NDArray[np.int32]
    units: NDArray[np.int32]
    problems: tuple[RowProblem, ...] = ()
    undeclared: int = 0

    def __len__(self) -> int:
        return len(self.texts)

    def __repr__(self) -> str:
        return f"Documents(<{len(self)} private documents of {self.unit_count} units>)"

    @property
    def unit_count(self) -> int:
        """Number of privacy units. Private."""
        return int(self.units.max()) + 1 if self.units.size else 0

    def by_unit(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(order, offsets): documents of unit ``u`` are ``order[offsets[u]:offsets[u + 1]]``."""
        order = np.argsort(self.units, kind="stable").astype(np.int64)
        offsets = np.zeros(self.unit_count + 1, dtype=np.int64)
        np.cumsum(np.bincount(self.units, minlength=self.unit_count), out=offsets[1:])
        return order, offsets

    @classmethod
    def load(cls, site: Site, study: Study) -> Documents:
        """Read the site's file as the study sees it. No usable document at all is not an error here.

        Raises
        ------
        DataError
            If the file can't be read, a column is missing, or a row is malformed and the site's file says ``stop``.
        """
        options = site.documents
        attributes = [options.column_of(name) for name in study.codes.names]
        patient = options.patient_column if study.privacy.unit == "patient" else None
        if study.privacy.unit == "patient" and patient is None:
            raise DataError(
                f"site {site.name!r}: the study protects patients; documents.patient_column must name their column"
            )
        reader = _Reader(options.path, [options.text_column, *attributes, *([patient] if patient else [])])
        builder = _Builder(study, options.text_column, attributes, patient)
        for number, row in reader.rows():
            builder.add(number, row)
        documents = builder.documents(reader.problems)
        if documents.problems and options.on_malformed == "stop":
            first = documents.problems[0]
            raise DataError(
                f"{options.path}: row {first.row} can't be used: {first.reason.value}; {len(documents.problems)} such "
                "rows in all, and documents.on_malformed is 'stop'"
            )
        return documents


class _Builder:
    def __init__(self, study: Study, text: str, attributes: Sequence[str], patient: str | None) -> None:
        self._study, self._text, self._attributes, self._patient = study, text, attributes, patient
        self._texts: list[str] = []
        self._codes: list[int] = []
        self._units: list[int] = []
        self._unit_of: dict[str, int] = {}
        self._problems: list[RowProblem] = []
        self._undeclared = 0

    def add(self, number: int, row: Mapping[str, Any]) -> None:
        text = as_text(row[self._text])
        values = tuple(as_text(row[column]) for column in self._attributes)
        patient = as_text(row[self._patient]) if self._patient else str(number)
        for missing, reason in (
            (not text, Problem.NO_TEXT),
            (not all(values), Problem.NO_CODE),
            (not patient, Problem.NO_PATIENT),
        ):
            if missing:
                self._problems.append(RowProblem(number, reason))
                return
        code = self._study.codes.index(values)
        if code is None:
            self._undeclared += 1
            return
        self._texts.append(text)
        self._codes.append(code)
        self._units.append(self._unit_of.setdefault(patient, len(self._unit_of)))

    def documents(self, unreadable: Sequence[RowProblem]) -> Documents:
        return Documents(
            tuple(self._texts),
            np.array(self._codes, dtype=np.int32),
            np.array(self._units, dtype=np.int32),
            tuple(sorted([*unreadable, *self._problems], key=lambda problem: problem.row)),
            self._undeclared,
        )


def as_text(value: Any) -> str:
    """A cell as text without outer blanks: 4 and 4.0 are '4', true is 'true', nothing is ''."""
    if value is None or (isinstance(value, float) and value != value):
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def read_columns(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """All well-formed rows of a file, with the named columns only.

    Raises
    ------
    DataError
        If the file can't be read or a column is missing.
    """
    return [dict(row) for _, row in _Reader(path, columns).rows()]


class _Reader:
    """Rows of a Parquet, CSV or JSONL file, in batches, with the rows that can't be parsed on the side."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._path = path
        self._columns = list(dict.fromkeys(columns))
        self.problems: list[RowProblem] = []
        _check_file(path)

    def rows(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """(row number, row) for every row that can be parsed."""
        name = self._path.name.lower().removesuffix(".gz")
        try:
            if name.endswith(".parquet"):
                yield from self._parquet()
            elif name.endswith(".csv"):
                yield from self._csv()
            else:
                yield from self._json_lines()
        except (pa.ArrowException, OSError, EOFError) as cause:
            raise DataError(
                f"{self._path}: can't be read as {name.rsplit('.', 1)[-1]}: the file is damaged or of another format"
            ) from cause

    def _parquet(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        file = pq.ParquetFile(self._path)
        self._require(file.schema_arrow.names)
        number = 0
        for batch in file.iter_batches(BATCH_ROWS, columns=self._columns):
            for row in batch.to_pylist():
                number += 1
                yield number, row

    def _csv(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        skipped: list[int] = []

        def note(row: Any) -> str:
            skipped.append(row.number)
            return "skip"

        with _opened(self._path) as stream:
            table = pacsv.open_csv(
                stream,
                # One thread: only then does pyarrow tell the number of a row that it can't parse.
                read_options=pacsv.ReadOptions(use_threads=False, block_size=1 << 22),
                parse_options=pacsv.ParseOptions(newlines_in_values=True, invalid_row_handler=note),
                convert_options=pacsv.ConvertOptions(
                    column_types={name: pa.string() for name in self._columns}, strings_can_be_null=True
                ),
            )
            self._require(table.schema.names)
            number = 0
            for batch in table:
                for row in batch.select(self._columns).to_pylist():
                    number += 1
                    # A skipped row keeps its number, counted from the header as row 1 by pyarrow.
                    while len(self.problems) < len(skipped) and skipped[len(self.problems)] - 1 <= number:
                        self.problems.append(RowProblem(number, Problem.WRONG_CELLS))
                        number += 1
                    yield number, row
        for _ in skipped[len(self.problems) :]:
            number += 1
            self.problems.append(RowProblem(number, Problem.WRONG_CELLS))

    def _json_lines(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        # Line by line: one bad line would make pyarrow's reader fail as a whole, and types may differ between rows.
        seen: set[str] = set()
        number = 0
        with _opened(self._path) as stream:
            for line in stream:
                if not line.strip():
                    continue
                number += 1
                row = _json_object(line if number > 1 else line.removeprefix(b"\xef\xbb\xbf"))
                if row is None:
                    self.problems.append(RowProblem(number, Problem.NOT_JSON))
                    continue
                seen |= row.keys()
                yield number, {column: row.get(column) for column in self._columns}
        self._require(sorted(seen))

    def _require(self, there: Sequence[str]) -> None:
        doubled = sorted(name for name, count in Counter(there).items() if count > 1 and name in self._columns)
        if doubled:
            raise DataError(f"{self._path}: column {doubled[0]!r} is there twice; column names must be distinct")
        for column in self._columns:
            if column not in there:
                raise DataError(
                    f"{self._path}: column {column!r} is missing; the file has {', '.join(map(repr, there)) or 'none'}; "
                    "name the right one in the site file's [documents]"
                )


def _opened(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb")  # type: ignore[return-value]


def _json_object(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise DataError(f"{path}: is a folder; a file is needed ({', '.join(SUFFIXES)})")
    if not path.is_file():
        raise DataError(f"{path}: no such file; a file is needed ({', '.join(SUFFIXES)})")
    if not path.name.lower().endswith(SUFFIXES):
        raise DataError(f"{path}: unknown kind of file; {', '.join(SUFFIXES)} are accepted")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty; at least one document is needed")
