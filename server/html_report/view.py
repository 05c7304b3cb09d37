"""What the page is made of: sections of figures, tables and words. Names and texts in them are data, never markup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from server.html_report.words import several

LONG_WORD = 28
"""Longer words are broken anywhere."""

LONG_TABLE = 60
"""Rows of a table that is open from the start."""

WORDY = 30
"""Longer cells get room for some words a line."""


@dataclass(frozen=True)
class Drawing:
    """One chart, drawn twice: for a wide page and for a phone, where a shrunken one couldn't be read."""

    wide: Markup
    narrow: Markup


@dataclass(frozen=True)
class Key:
    """An entry of a legend: ``shape`` (bar, hole, tick, line, dashes, dot, ring, band), ``colour`` of the palette."""

    shape: str
    colour: str
    words: str


@dataclass(frozen=True)
class Column:
    """A column of a table; numbers are set flush right."""

    name: str
    numeric: bool = False

    def shape_of(self, cell: str) -> str:
        """How a cell is set: ``n`` a number, ``unbroken`` a long word, ``wordy`` many words; else ''."""
        if self.numeric:
            return "n"
        if any(len(word) > LONG_WORD for word in cell.split()):
            return "unbroken"
        return "wordy" if len(cell) > WORDY else ""


@dataclass(frozen=True)
class Table:
    """A table; the first cell of a row names it.

    Attributes
    ----------
    folded
        Whether it is shown on demand only. In print it is open, unless it stands beside a chart that says the same.
    last_is_total
        Whether the last row sums up the others.
    """

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    folded: bool = True
    last_is_total: bool = False
    kind: str = field(default="table", init=False)

    @property
    def long(self) -> bool:
        """Whether it would push what follows out of sight, and is shown on demand too."""
        return len(self.rows) > LONG_TABLE

    @property
    def size(self) -> str:
        """How many rows there are, in words."""
        return several(len(self.rows), "row")


@dataclass(frozen=True)
class Figure:
    """A chart with what it says in a sentence, and its numbers. ``name``: letters, digits and ``-``."""

    name: str
    title: str
    drawing: Drawing
    reading: str
    legend: Sequence[Key] = ()
    table: Table | None = None
    kind: str = field(default="figure", init=False)


@dataclass(frozen=True)
class Words:
    """A paragraph."""

    text: str
    kind: str = field(default="words", init=False)


@dataclass(frozen=True)
class Text:
    """One text of the corpus, as the browser shows it.

    ``code`` is a position in the browser's codes, ``cut`` says how many characters aren't shown, if any.
    """

    code: int
    shown: Markup
    origin: str
    cut: str


@dataclass(frozen=True)
class Browser:
    """Texts of the corpus with the codes they have."""

    codes: Sequence[str]
    texts: Sequence[Text]
    reading: str
    kind: str = field(default="browser", init=False)


Block = Table | Figure | Words | Browser


@dataclass(frozen=True)
class Section:
    """A section of the page. ``short`` is its name in the contents."""

    name: str
    title: str
    short: str
    lead: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class KeyFigure:
    """A number at the top of the page, what it is, and a remark."""

    number: str
    label: str
    remark: str = ""
    warning: bool = False


@dataclass(frozen=True)
class Page:
    """The whole report."""

    title: str
    subtitle: str
    figures: Sequence[KeyFigure]
    sections: Sequence[Section]
    warnings: Sequence[str]
