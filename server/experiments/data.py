"""The real documents of an experiment: those that sites hold, and those that judge. Public text only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.codes import ControlCodes
from common.errors import DataError
from common.models.embedder import visible
from common.site.formats import read_columns
from server.evaluation.texts import Texts, without
from server.experiments.plan import Data
from server.experiments.sentences import LabelledSentences

PATIENT = "patient"
"""Column of a site's file with the privacy unit."""


@dataclass(frozen=True, repr=False)
class RealDocuments:
    """Documents with a declared code each.

    Attributes
    ----------
    rows
        What a site's file holds of each: ``text``, every attribute, and the patient if there is one.
    columns
        Further columns, for partitions; attributes are among them.
    """

    rows: tuple[Mapping[str, str], ...]
    columns: Mapping[str, tuple[str, ...]]

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"RealDocuments(<{len(self)} documents>)"

    @cached_property
    def sha256(self) -> str:
        """Hash of what sites' files hold."""
        return hashlib.sha256(self.lines(range(len(self)))).hexdigest()

    def lines(self, numbers: Sequence[int] | NDArray[np.int64]) -> bytes:
        """JSON lines of some of them, as a site's file has them."""
        return "".join(json.dumps(self.rows[int(i)]) + "\n" for i in numbers).encode()

    def of_patients(self, each: int) -> RealDocuments:
        """The same documents, ``each`` in turn said to be one patient's."""
        rows = tuple({**row, PATIENT: f"patient {place // each}"} for place, row in enumerate(self.rows))
        return RealDocuments(rows, self.columns)

    def at(self, numbers: Sequence[int] | NDArray[np.int64]) -> RealDocuments:
        """Some of them."""
        chosen = [int(i) for i in numbers]
        columns = {name: tuple(values[i] for i in chosen) for name, values in self.columns.items()}
        return RealDocuments(tuple(self.rows[i] for i in chosen), columns)

    def saying(self, texts: Sequence[str]) -> RealDocuments:
        """The same documents with other texts."""
        rows = tuple({**row, "text": text} for row, text in zip(self.rows, texts, strict=True))
        return RealDocuments(rows, self.columns)

    def and_also(self, rows: Sequence[Mapping[str, str]]) -> RealDocuments:
        """These and further ones, which partitions know nothing of."""
        return RealDocuments((*self.rows, *rows), self.columns) if rows else self

    def texts(self, name: str, attributes: Sequence[str]) -> Texts:
        """All of them as an evaluation reads them."""
        labels = {attribute: tuple(row[attribute] for row in self.rows) for attribute in attributes}
        return Texts(name, tuple(visible(row["text"]) for row in self.rows), labels)


@dataclass(frozen=True)
class RealData:
    """Documents of the sites, and texts that had no part in anything that is judged by them."""

    train: RealDocuments
    test: Texts
    entities: LabelledSentences | None = None

    @cached_property
    def test_sha256(self) -> str:
        """Hash of the texts that judge, with their labels."""
        return hashlib.sha256(json.dumps([self.test.texts, dict(self.test.labels)]).encode()).hexdigest()

    @classmethod
    def load(cls, options: Data, codes: ControlCodes, folder: Path) -> RealData:
        """Read the file; documents whose values the codes don't declare are left out, as a site would.

        Raises
        ------
        DataError
            If the file can't be read, has no document on one side, or none of a declared value: that is a misspelling.
        """
        path = folder / options.file
        columns = {name: options.code_columns.get(name, name) for name in codes.names}
        further = [*options.more_columns, *([options.patient_column] if options.patient_column else [])]
        wanted = dict.fromkeys([options.text_column, options.split_column, *columns.values(), *further])
        table = read_columns(path, list(wanted))
        usable = [row for row in table if row[options.text_column] and _is_declared(row, columns, codes)]
        sides = {
            "train": [row for row in usable if row[options.split_column] in options.train],
            "test": [row for row in usable if row[options.split_column] in options.test],
        }
        for side, rows in sides.items():
            if not rows:
                found = sorted({row[options.split_column] for row in table})[:5]
                raise DataError(
                    f"{path}: no {side} document has a text and values that the codes declare; data.{side} is "
                    f"{list(getattr(options, side))}, and column {options.split_column!r} has {found}"
                )
        _check_values(path, table, columns, codes)
        held = _documents(_drawn(sides["train"], options.most), options, columns)
        judges = _documents(_drawn(sides["test"], options.most_test), options, columns).texts("test texts", codes.names)
        judges = without(judges, held.texts("documents", codes.names))
        if options.tagged_file is None:
            return cls(held, judges)
        sentences = LabelledSentences.load(
            folder / options.tagged_file, options.split_column, options.train, options.test
        )
        return cls(held, judges, sentences)


def _check_values(
    path: Path, table: Sequence[Mapping[str, str]], columns: Mapping[str, str], codes: ControlCodes
) -> None:
    for attribute in codes.attributes:
        column = columns[attribute.name]
        there = {row[column] for row in table}
        unknown = [value for value in attribute.values if value not in there]
        if unknown:
            raise DataError(
                f"{path}: the codes declare {attribute.name} {unknown[0]!r}, which no document has; column {column!r} "
                f"has {sorted(there)[:20]}"
            )


def _is_declared(row: Mapping[str, str], columns: Mapping[str, str], codes: ControlCodes) -> bool:
    return all(row[columns[attribute.name]] in attribute.declared for attribute in codes.attributes)


def _drawn(rows: list[dict[str, str]], most: int | None) -> list[dict[str, str]]:
    if most is None or len(rows) <= most:
        return rows
    chosen = np.random.default_rng(0).permutation(len(rows))[:most]
    return [rows[i] for i in np.sort(chosen)]


def _documents(rows: Sequence[Mapping[str, str]], options: Data, columns: Mapping[str, str]) -> RealDocuments:
    held = [dict(_fields(row, options, columns)) for row in rows]
    named = {name: tuple(row[name] for row in held) for name in columns}
    further = {name: tuple(row[name] for row in rows) for name in options.more_columns}
    return RealDocuments(tuple(held), named | further)


def _fields(row: Mapping[str, str], options: Data, columns: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    yield "text", row[options.text_column]
    for attribute, column in columns.items():
        yield attribute, row[column]
    if options.patient_column:
        yield PATIENT, row[options.patient_column]
