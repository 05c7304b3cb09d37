"""Texts that were seen before, exactly or nearly, in memory that stays small: 16 to 32 bytes a text, and 32 MB."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

HASHES = 64
"""MinHash values of a text, over which near duplicates are looked for."""

MOST_PLACES = 2**24
"""Of all bands' tables, at two bytes: of some thousands of texts one is taken for a near duplicate by chance. Beyond so
many texts the oldest ones are forgotten, one by one."""

_SHINGLE = 5
"""Characters of a shingle."""

_NOT_WORDS = re.compile(r"[\W_]+")
_MIX = np.uint64(0xFF51AFD7ED558CCD)


class SeenTexts:
    """A set of 64-bit digests: an open table, at most half full.

    Two texts among a million share a digest with a chance of three in a hundred million; the second is then taken for a
    duplicate.
    """

    def __init__(self) -> None:
        self._table: NDArray[np.uint64] = np.zeros(2**10, dtype=np.uint64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, digest: np.uint64) -> bool:
        return bool(self._table[self._place(int(digest) or 1)])

    def add(self, digest: np.uint64) -> None:
        """Take a digest in."""
        # 0 stands for an empty place.
        value = int(digest) or 1
        place = self._place(value)
        if self._table[place]:
            return
        self._table[place] = value
        self._count += 1
        if 2 * self._count > self._table.size:
            self._grow()

    def _place(self, value: int) -> int:
        """Where a value is, or could be."""
        last = self._table.size - 1
        place = value & last
        while self._table[place] and self._table[place] != value:
            place = (place + 1) & last
        return place

    def _grow(self) -> None:
        values = self._table[self._table != 0]
        self._table = np.zeros(2 * self._table.size, dtype=np.uint64)
        last = np.uint64(self._table.size - 1)
        # All at once, then those whose place was taken at the next one.
        places = values & last
        while values.size:
            free = self._table[places] == 0
            self._table[places[free]] = values[free]
            there = self._table[places] == values
            values, places = values[~there], (places[~there] + np.uint64(1)) & last


class NearTexts:
    """Texts of a code that are nearly like an earlier one, by MinHash in bands (Broder 1997).

    Two texts whose shingles of five characters overlap by the threshold (Jaccard) are found with a chance of about one
    half, more alike ones nearly always: at a threshold of 0.8, 92 % of those at 0.9 and 4 % of those at 0.6. A band's
    table has a place for every text that is expected, twice over, as far as `MOST_PLACES` go; what is written over is
    forgotten.

    Parameters
    ----------
    threshold
        0 to 1.
    expected
        Texts.
    """

    def __init__(self, threshold: float, expected: int) -> None:
        self._bands, self._rows = _bands(threshold)
        places = min(2 ** (2 * max(expected, 1) - 1).bit_length(), 2 ** ((MOST_PLACES // self._bands).bit_length() - 1))
        self._table = np.zeros((self._bands, places), dtype=np.uint16)
        self._band = np.arange(self._bands)
        source = np.random.default_rng(0)
        # Odd factors: each is a permutation of the 64-bit numbers.
        self._factors = source.integers(2**63, size=(self._bands * self._rows, 1), dtype=np.uint64) * np.uint64(2) + 1
        self._offsets = source.integers(2**63, size=(self._bands * self._rows, 1), dtype=np.uint64)

    def add(self, folded: str, code: int) -> bool:
        """Whether a text is nearly like an earlier one of its code; taken in if it isn't.

        Parameters
        ----------
        folded
            In one case.
        """
        places, marks = self._signature(folded, code)
        if (self._table[self._band, places] == marks).any():
            return True
        self._table[self._band, places] = marks
        return False

    def _signature(self, folded: str, code: int) -> tuple[NDArray[np.int64], NDArray[np.uint16]]:
        """A place and a mark for every band."""
        least = (_shingles(folded) * self._factors + self._offsets).min(axis=1).reshape(self._bands, self._rows)
        mixed = np.full(self._bands, _scrambled(np.array([code], dtype=np.uint64))[0])
        for column in least.T:
            mixed = _scrambled(mixed ^ column)
        # 0 stands for an empty place.
        marks = (mixed >> np.uint64(48)).astype(np.uint16) | np.uint16(1)
        return (mixed & np.uint64(self._table.shape[1] - 1)).astype(np.int64), marks


def _bands(threshold: float) -> tuple[int, int]:
    """Bands and rows of a band with which a pair at the threshold is found about every other time."""
    shapes = [(HASHES // rows, rows) for rows in range(1, HASHES + 1)]
    return min(shapes, key=lambda shape: abs((1 - (1 - threshold ** shape[1]) ** shape[0]) - 0.5))


def _shingles(folded: str) -> NDArray[np.uint64]:
    """Hashes of all runs of five characters, of letters, digits and single blanks; of the whole if it is shorter."""
    plain = _NOT_WORDS.sub(" ", folded).strip() or folded
    points = np.frombuffer(plain.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.uint64)
    size = min(_SHINGLE, points.size)
    hashes = np.zeros(points.size - size + 1, dtype=np.uint64)
    for offset in range(size):
        hashes = _scrambled(hashes ^ points[offset : offset + hashes.size])
    return hashes


def _scrambled(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values + np.uint64(0x9E3779B97F4A7C15)) * _MIX
    return values ^ (values >> np.uint64(33))
