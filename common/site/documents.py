"""A site's documents: one file, mapped to control codes and privacy units. Private.

Where an attribute may have several values, a document has several codes and stands here once under each, all of one
unit. So what bounds a unit's documents bounds it too: at most c codes in the profile, R votes, one gradient a step.

Malformed rows are told to the operator by row number and reason, never by content; rows whose values the study doesn't
declare are counted. Neither is sent anywhere.

    documents = Documents.load(site, study)
    order, offsets = documents.by_unit()
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.codes import Attribute
from common.errors import DataError
from common.site import formats
from common.site.config import Site
from common.site.formats import Problem, Row, as_text, format_of, rows_of
from common.study import Study

REPORTED_ROWS = 20
"""Malformed rows that a report names; it counts the rest."""

Progress = Callable[[int], None]
"""Called now and then with the rows read so far. A private number: for the operator's screen."""


@dataclass(frozen=True, slots=True)
class RowProblem:
    """A malformed row: its number (1 is the first row of data; blank lines don't count) and the reason."""

    row: int
    reason: Problem


@dataclass(frozen=True, repr=False, eq=False)
class Documents:
    """A site's documents. Private: ``repr`` shows sizes only.

    Attributes
    ----------
    texts
        One text per document; the same text again for each further code of a document.
    codes
        Code index of each document, int32 ``(documents,)``.
    units
        Privacy unit of each document, int32 ``(documents,)``, numbered from 0 in order of appearance.
    problems
        Malformed rows that were left out, in order.
    undeclared
        Number of rows left out because the study doesn't declare one of their values (of several: none of them).
    further_codes
        How many of the documents are there for a further code of one.
    """

    texts: tuple[str, ...]
    codes: NDArray[np.int32]
    units: NDArray[np.int32]
    problems: tuple[RowProblem, ...] = ()
    undeclared: int = 0
    further_codes: int = 0

    def __post_init__(self) -> None:
        shape = (len(self.texts),)
        if self.codes.shape != shape or self.units.shape != shape:
            raise DataError(
                f"documents: {len(self.texts)} texts, codes {self.codes.shape}, units {self.units.shape}; "
                "one code and one unit per text are needed"
            )

    def __len__(self) -> int:
        return len(self.texts)

    def __repr__(self) -> str:
        return f"Documents(<{len(self)} private documents of {self.unit_count} units>)"

    @property
    def unit_count(self) -> int:
        """Number of privacy units. Private."""
        return int(self.units.max()) + 1 if self.units.size else 0

    def report(self) -> str:
        """What was read and what was left out, by row number and reason. Private: for the operator's screen and log."""
        named = [f"row {problem.row}: {problem.reason.value}" for problem in self.problems[:REPORTED_ROWS]]
        more = len(self.problems) - len(named)
        lines = [
            f"{len(self) - self.further_codes} documents of {self.unit_count} units can be used",
            *([f"{self.further_codes} times one counts under a further code"] if self.further_codes else []),
            f"{self.undeclared} rows have values that the study doesn't declare",
            f"{len(self.problems)} rows are malformed",
            *(f"  {line}" for line in named),
            *([f"  and {more} more"] if more else []),
        ]
        return "\n".join(lines)

    def by_unit(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(order, offsets): documents of unit ``u`` are ``order[offsets[u]:offsets[u + 1]]``.

        Shapes ``(documents,)`` and ``(unit_count + 1,)``. Private.
        """
        order = np.argsort(self.units, kind="stable").astype(np.int64)
        offsets = np.zeros(self.unit_count + 1, dtype=np.int64)
        np.cumsum(np.bincount(self.units, minlength=self.unit_count), out=offsets[1:])
        return order, offsets

    @classmethod
    def load(cls, site: Site, study: Study, *, progress: Progress | None = None) -> Documents:
        """Read the site's file as the study sees it. No usable document at all is not an error here.

        Raises
        ------
        DataError
            If the file can't be read, a column is missing, or a row is malformed and the site says ``stop``.
        """
        options = site.documents
        patient = _patient_column(site, study)
        columns = {options.text_column: "documents.text_column"}
        columns |= {options.column_of(name): "documents.code_columns" for name in study.codes.names}
        columns |= {patient: "documents.patient_column"} if patient else {}
        builder = _Builder(site, study, list(columns), patient)
        fixes = {name: f"name the right column in {key}" for name, key in columns.items()}
        lists = {options.column_of(a.name) for a in study.codes.attributes if a.multiple}
        rows = rows_of(options.path, fixes, lists)
        for number, row in enumerate(_counted(rows, progress), start=1):
            builder.add(number, row)
        documents = builder.documents()
        if documents.problems and options.on_malformed == "stop":
            first = documents.problems[0]
            raise DataError(
                f"{options.path}: row {first.row} can't be used: {first.reason.value}; "
                f"{len(documents.problems)} such rows in all, and documents.on_malformed is 'stop' "
                "('skip' leaves them out)"
            )
        return documents


_WHOLE_NUMBER = re.compile(r"([+-]?[0-9]+)\.0+")


class _Builder:
    """Gathers documents row by row."""

    def __init__(self, site: Site, study: Study, columns: Sequence[str], patient: str | None) -> None:
        self._study = study
        self._separator = site.documents.value_separator
        self._text = columns.index(site.documents.text_column)
        self._attributes = [columns.index(site.documents.column_of(name)) for name in study.codes.names]
        self._patient = columns.index(patient) if patient else None
        self._untyped = format_of(site.documents.path) == ".csv"
        self._texts: list[str] = []
        self._codes: list[int] = []
        self._units: list[int] = []
        self._unit_of: dict[str, int] = {}
        self._unit_count = 0
        self._further_codes = 0
        self._problems: list[RowProblem] = []
        self._undeclared = 0

    def add(self, number: int, row: Row | Problem) -> None:
        if isinstance(row, Problem):
            self._problems.append(RowProblem(number, row))
            return
        text = as_text(row[self._text])
        attributes = self._study.codes.attributes
        values = [self._values(row[place], a) for place, a in zip(self._attributes, attributes, strict=True)]
        patient = None if self._patient is None else self._retyped(as_text(row[self._patient]))
        problem = _missing(text, values, patient)
        if problem:
            self._problems.append(RowProblem(number, problem))
            return
        codes = self._study.codes.indices(values, self._study.privacy.codes_per_unit)
        if not codes:
            self._undeclared += 1
            return
        self._units += [self._unit(patient)] * len(codes)
        self._texts += [text] * len(codes)
        self._codes += codes
        self._further_codes += len(codes) - 1

    def documents(self) -> Documents:
        return Documents(
            tuple(self._texts),
            np.array(self._codes, dtype=np.int32),
            np.array(self._units, dtype=np.int32),
            tuple(self._problems),
            self._undeclared,
            self._further_codes,
        )

    def _unit(self, patient: str | None) -> int:
        """Number of the unit; every row is one where records are."""
        unit = self._unit_count if patient is None else self._unit_of.setdefault(patient, self._unit_count)
        self._unit_count = max(self._unit_count, unit + 1)
        return unit

    def _values(self, cell: Any, attribute: Attribute) -> list[str]:
        """The values in a cell, without empty ones, as the study spells them."""
        texts = [as_text(part) for part in (cell if isinstance(cell, list) else [cell])]
        if attribute.multiple and self._separator:
            texts = [part.strip() for text in texts for part in text.split(self._separator)]
        return [text if text in attribute.declared else self._retyped(text) for text in texts if text]

    def _retyped(self, value: str) -> str:
        # A CSV file has no types: 4 written by a table that also has gaps is 4.0, and true may be True. Two
        # spellings of one patient must be one unit, or that patient would count twice.
        if not self._untyped:
            return value
        if whole := _WHOLE_NUMBER.fullmatch(value):
            return whole[1]
        return value.lower() if value in ("True", "False", "TRUE", "FALSE") else value


def _missing(text: str, values: Sequence[Sequence[str]], patient: str | None) -> Problem | None:
    if not text:
        return Problem.NO_TEXT
    if not all(values):
        return Problem.NO_CODE
    return Problem.NO_PATIENT if patient == "" else None


def _patient_column(site: Site, study: Study) -> str | None:
    if study.privacy.unit != "patient":
        return None
    if site.documents.patient_column is None:
        raise DataError(
            f"site {site.name!r}: study {study.name!r} protects patients; documents.patient_column must name "
            "the column that tells them apart"
        )
    return site.documents.patient_column


def _counted(rows: Iterable[Row | Problem], progress: Progress | None) -> Iterator[Row | Problem]:
    number = 0
    for number, row in enumerate(rows, start=1):
        yield row
        if progress and number % formats.BATCH_ROWS == 0:
            progress(number)
    if progress:
        progress(number)
