"""Names and numbers of persons that the site's own columns give, looked for in texts.

Capitals don't matter, nor what stands between the words; "Smith, John" is also "John Smith", and a number may be
written in groups. A single word, such as a surname, counts only where it has a capital. Short values are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from common.site.audit.words import WORD

SHORTEST_NAME = 3
"""Letters of the shortest value that is looked for."""

SHORTEST_NUMBER = 5
"""Digits of the shortest number that is looked for."""

_GROUPS = 5
"""In which a number may be written."""


@dataclass(frozen=True, repr=False)
class Value:
    """What a column says: its words without capitals, or all digits of a number as one. Private."""

    column: str
    words: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Value(<of column {self.column!r}>)"

    @property
    def is_one_name(self) -> bool:
        """Whether it is a single word, which by itself points to nobody."""
        return len(self.words) == 1 and not any(map(str.isdecimal, self.words[0]))


def values_of(column: str, cell: str) -> frozenset[Value]:
    """The value in a cell, in each order it may be written; none if it is too short to tell anybody apart."""
    words = tuple(WORD.findall(cell.casefold()))
    if all(word.isdecimal() for word in words):
        digits = "".join(words)
        return frozenset([Value(column, (digits,))] if len(digits) >= SHORTEST_NUMBER else [])
    if sum(map(len, words)) < SHORTEST_NAME:
        return frozenset()
    last, _, first = cell.casefold().partition(",")
    return frozenset([Value(column, words), Value(column, (*WORD.findall(first), *WORD.findall(last)))])


def values_of_row(cells: Mapping[str, str]) -> frozenset[Value]:
    """The values of several columns, and pairs of names in neighbouring columns: given name and surname."""
    found = frozenset(value for column, cell in cells.items() for value in values_of(column, cell))
    names = [(column, cell) for column, cell in cells.items() if any(v.is_one_name for v in values_of(column, cell))]
    pairs = [values_of(f"{first} + {second}", f"{one}, {other}") for (first, one), (second, other) in pairwise(names)]
    return found.union(*pairs)


class KnownValues:
    """Finds values in texts."""

    def __init__(self, values: Iterable[Value]) -> None:
        self._by_first: defaultdict[str, list[Value]] = defaultdict(list)
        for value in values:
            self._by_first[value.words[0]].append(value)

    def found(self, text: str) -> Iterator[tuple[Value, str]]:
        """Each value that is in a text as it looks, and how it is written there."""
        if not self._by_first:
            return
        places = [(match.start(), match.end()) for match in WORD.finditer(text)]
        words = [text[start:end].casefold() for start, end in places]
        for i, (start, _) in enumerate(places):
            for value in self._by_first.get(words[i], ()):
                number = len(value.words)
                if tuple(words[i : i + number]) == value.words and not (value.is_one_name and text[start].islower()):
                    yield value, text[start : places[i + number - 1][1]]
            for groups in range(2, _GROUPS + 1):
                if i + groups > len(words) or not words[i + groups - 1].isdecimal() or not words[i].isdecimal():
                    break
                for value in self._by_first.get("".join(words[i : i + groups]), ()):
                    if len(value.words) == 1:
                        yield value, text[start : places[i + groups - 1][1]]
