"""What a leak check reads: a corpus, the site's own documents, and held-out ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.errors import DataError
from common.models.embedder import visible
from common.site.audit.known_values import Value, values_of_row
from common.site.config import Site
from common.site.documents import Documents
from common.site.formats import Problem, as_text, rows_of
from common.study import Study

TEXT_COLUMN = "text"
"""Of a corpus."""


@dataclass(frozen=True, repr=False)
class Texts:
    """Texts as they look, and the row of the file that each is from (1 is the first row of data).

    ``unreadable`` rows have no text, or none that can be read.
    """

    texts: tuple[str, ...]
    rows: tuple[int, ...]
    unreadable: int = 0

    def __repr__(self) -> str:
        return f"Texts(<{len(self.texts)} texts>)"


@dataclass(frozen=True, repr=False)
class OwnDocuments:
    """A site's documents. Private: ``repr`` shows sizes only.

    Attributes
    ----------
    texts
        Documents as they look.
    units
        Privacy unit of each, int64 ``(documents,)``.
    values
        What the site's identifier columns say of each.
    """

    texts: tuple[str, ...]
    units: NDArray[np.int64]
    values: tuple[frozenset[Value], ...]

    def __repr__(self) -> str:
        return f"OwnDocuments(<{len(self.texts)} private documents>)"

    @classmethod
    def of(cls, texts: Sequence[str], units: Iterable[int]) -> OwnDocuments:
        """Documents without identifier columns."""
        numbers = np.fromiter(units, dtype=np.int64, count=len(texts))
        return cls(tuple(texts), numbers, (frozenset(),) * len(texts))


def read_corpus(files: Sequence[Path]) -> Texts:
    """The synthetic texts of one file, or of several one after the other.

    Raises
    ------
    DataError
        If a file can't be read, has no column 'text', or there is no text.
    """
    read = _texts(files, TEXT_COLUMN, "a corpus has its texts in this column")
    if not read.texts:
        raise DataError(f"{files[0]}: {read.unreadable} rows and no text in column 'text'; at least one text is needed")
    return read


def read_holdout(path: Path, site: Site) -> Texts:
    """Documents that had no part in the study, in a file like the site's own. Private.

    Raises
    ------
    DataError
        If the file can't be read, lacks the site's text column, or has no text.
    """
    column = site.documents.text_column
    read = _texts([path], column, "held-out documents need the text column of site.toml, documents.text_column")
    if not read.texts:
        raise DataError(f"{path}: no text in column {column!r}; at least one held-out document is needed")
    return read


def read_documents(site: Site, study: Study | None) -> OwnDocuments:
    """The documents that a study uses, or without a study all that the site's file has.

    Raises
    ------
    DataError
        If the file can't be read, a column is missing, or there is no document.
    """
    if study is not None:
        documents = Documents.load(site, study)
        read: Iterable[tuple[str, int]] = zip(documents.texts, documents.units.tolist(), strict=True)
        missing = f"study {study.name!r} can use none of them"
    else:
        read = _all_documents(site)
        missing = f"no text in column {site.documents.text_column!r}"
    # Once for each unit: a document with several codes would be its own second neighbour.
    kept = dict.fromkeys((shown, unit) for text, unit in read if (shown := visible(text)))
    if not kept:
        raise DataError(f"{site.documents.path}: no documents: {missing}; at least one is needed")
    values = _values(site)
    return OwnDocuments(
        tuple(text for text, _ in kept),
        np.array([unit for _, unit in kept], dtype=np.int64),
        tuple(values.get(text, frozenset()) for text, _ in kept),
    )


def _texts(files: Sequence[Path], column: str, fix: str) -> Texts:
    texts, rows, number = [], [], 0
    read = chain.from_iterable(rows_of(file, {column: fix}) for file in files)
    for number, row in enumerate(read, start=1):
        if not isinstance(row, Problem) and (shown := visible(as_text(row[0]))):
            texts.append(shown)
            rows.append(number)
    return Texts(tuple(texts), tuple(rows), number - len(texts))


def _all_documents(site: Site) -> list[tuple[str, int]]:
    """(text, unit) of all rows that can be read; without a patient, a document is a unit of its own."""
    patient = site.documents.patient_column
    rows = _columns(site, {patient: "documents.patient_column"} if patient else {})
    names: dict[str | int, int] = {}
    return [
        (row[0], names.setdefault((row[1] if patient else "") or number, len(names))) for number, row in enumerate(rows)
    ]


def _values(site: Site) -> dict[str, frozenset[Value]]:
    """Document as it looks -> what the identifier columns say of it."""
    columns = site.documents.identifier_columns
    if not columns:
        return {}
    found: defaultdict[str, set[Value]] = defaultdict(set)
    for text, *cells in _columns(site, dict.fromkeys(columns, "documents.identifier_columns")):
        found[visible(text)] |= values_of_row(dict(zip(columns, map(visible, cells), strict=True)))
    return {text: frozenset(values) for text, values in found.items()}


def _columns(site: Site, further: dict[str, str]) -> list[list[str]]:
    """The text and further columns of all rows that can be read."""
    options = site.documents
    keys = {options.text_column: "documents.text_column", **further}
    fixes = {name: f"name the right column in {key}" for name, key in keys.items()}
    rows = rows_of(options.path, fixes)
    read = [dict(zip(fixes, map(as_text, row), strict=True)) for row in rows if not isinstance(row, Problem)]
    return [[row[name] for name in (options.text_column, *further)] for row in read]
