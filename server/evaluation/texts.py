"""Texts with labels: a corpus, or real documents to compare it with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.errors import DataError
from common.models.embedder import visible
from common.site.formats import Problem, as_text, rows_of

NAMED = 5
"""Labels that a sentence names; it counts the rest."""


@dataclass(frozen=True)
class Columns:
    """Where a file has its texts and labels.

    Attributes
    ----------
    text
        Column of the text.
    labels
        Attribute -> its column.
    """

    text: str
    labels: Mapping[str, str]


@dataclass(frozen=True, repr=False)
class Texts:
    """Texts, each with a label of every attribute. Private where they are documents.

    Attributes
    ----------
    name
        What a sentence calls them, such as the file they are from.
    texts
        As they look (see `common.models.embedder.visible`); none is empty.
    labels
        Attribute -> the label of each text.
    left_out
        Rows without a text or a label, or that can't be read.
    """

    name: str
    texts: tuple[str, ...]
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    left_out: int = 0

    def __post_init__(self) -> None:
        for attribute, labels in self.labels.items():
            if len(labels) != len(self.texts):
                raise DataError(f"{self.name}: {len(self.texts)} texts and {len(labels)} labels of {attribute!r}")

    def __len__(self) -> int:
        return len(self.texts)

    def __repr__(self) -> str:
        return f"Texts({self.name!r}, <{len(self)} texts>)"

    @property
    def codes(self) -> tuple[tuple[str, ...], ...]:
        """All labels of each text."""
        return tuple(zip(*self.labels.values(), strict=True)) if self.labels else ((),) * len(self)

    def at(self, places: Sequence[int] | NDArray[np.int64]) -> Texts:
        """The texts at these places."""
        chosen = [int(place) for place in places]
        labels = {name: tuple(values[i] for i in chosen) for name, values in self.labels.items()}
        return replace(self, texts=tuple(self.texts[i] for i in chosen), labels=labels)

    def drawn(self, number: int, seed: int) -> Texts:
        """So many of them, or all, drawn by chance. The same seed draws the same; no privacy hangs on it."""
        order = np.random.default_rng(seed).permutation(len(self))
        return self.at(order[:number])


def read_texts(path: Path, name: str, columns: Columns) -> Texts:
    """The texts of a file (Parquet, CSV, JSONL) as they look.

    Parameters
    ----------
    name
        What sentences call it, e.g. ``--test reviews.csv``.

    Raises
    ------
    DataError
        If the file can't be read, lacks a column, or has no row with a text and every label.
    """
    fixes = {columns.text: "--text-column names the column with the texts"}
    fixes |= dict.fromkeys(columns.labels.values(), "--label-column names the columns with the labels")
    wanted = [columns.text, *columns.labels.values()]
    kept: list[list[str]] = []
    rows = 0
    for row in rows_of(path, fixes):
        rows += 1
        if isinstance(row, Problem):
            continue
        cells = dict(zip(fixes, map(as_text, row), strict=True))
        found = [visible(cells[columns.text]), *(cells[column] for column in wanted[1:])]
        if all(found):
            kept.append(found)
    if not kept:
        raise DataError(
            f"{name}: none of {rows} rows has a text in column {columns.text!r} and a label in each of "
            f"{list(columns.labels.values())}; empty cells and lists can't be used"
        )
    texts, *labels = zip(*kept, strict=True)
    return Texts(name, texts, dict(zip(columns.labels, labels, strict=True)), rows - len(kept))


def key(text: str) -> bytes:
    """What two texts share that are the same but for case and white space: a hash, so that no text is kept."""
    return hashlib.blake2b(visible(text).casefold().encode("utf-8", "surrogatepass"), digest_size=16).digest()


def keys(texts: Texts) -> list[bytes]:
    """The key of each text."""
    return [key(text) for text in texts.texts]


def without(texts: Texts, others: Texts) -> Texts:
    """Those that aren't among ``others``."""
    known = set(keys(others))
    return texts.at([i for i, own in enumerate(keys(texts)) if own not in known])


def check_apart(documents: Texts, others: Texts) -> None:
    """Texts that are on both sides would be known by heart on one and count as new on the other.

    Raises
    ------
    DataError
        If there are any.
    """
    known = set(keys(documents))
    shared = [number for number, own in enumerate(keys(others), start=1) if own in known]
    if shared:
        named = ", ".join(map(str, shared[:NAMED])) + (" and others" if len(shared) > NAMED else "")
        raise DataError(
            f"{len(shared)} of the {len(others)} texts of {others.name} are also in {documents.name}, apart from case "
            f"and blanks (text {named} of those with labels); it must hold documents that had no part in the corpus. "
            "--drop-overlap leaves them out"
        )


def check_labels(texts: Texts) -> None:
    """A label that all texts have can't be told from others.

    Raises
    ------
    DataError
        If an attribute has one label only.
    """
    for attribute, labels in texts.labels.items():
        found = sorted(set(labels))
        if len(found) < 2:
            raise DataError(
                f"{texts.name}: every text has {attribute} {found[0]!r}; texts of at least two labels are needed"
            )


def unknown_labels(corpus: Texts, test: Texts, attribute: str) -> list[str]:
    """Labels of the test texts that no text of the corpus has.

    Raises
    ------
    DataError
        If that is all of them.
    """
    known, found = set(corpus.labels[attribute]), set(test.labels[attribute])
    if not known & found:
        raise DataError(
            f"{test.name}: no text has a label of {attribute!r} that the corpus has; it has {listed(found)}, the "
            f"corpus {listed(known)}; is it the right column, and spelled the same?"
        )
    return sorted(found - known)


def listed(labels: set[str]) -> str:
    """Some labels, in words."""
    ordered = sorted(labels)
    more = f" and {len(ordered) - NAMED} more" if len(ordered) > NAMED else ""
    return ", ".join(map(repr, ordered[:NAMED])) + more
