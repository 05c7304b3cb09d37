"""Texts of one side of a comparison as one row of characters, in blocks, and fingerprints of their runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

END = "\0"
"""Between texts. A text as it looks (`common.models.embedder.visible`) has none."""


def multipliers() -> Sequence[int]:
    """Odd numbers below 2^64 by chance, for fingerprints."""
    return [int(m) for m in np.random.default_rng().integers(1 << 63, size=64, dtype=np.uint64) * 2 + 1]


@dataclass(frozen=True, repr=False, eq=False)
class Side:
    """Texts of one side, one after the other.

    ``characters`` are code points, uint32, with an end after each text; ``offsets`` say where each text begins, and
    ``first`` is the index of the first.
    """

    texts: Sequence[str]
    first: int
    characters: NDArray[np.uint32]
    offsets: Ints

    @classmethod
    def of(cls, texts: Sequence[str], span: range) -> Side:
        """The texts of a block."""
        own = texts[span.start : span.stop]
        joined = "".join(text + END for text in own).encode("utf-32-le", "surrogatepass")
        offsets = np.concatenate([[0], np.cumsum([len(text) + 1 for text in own])])
        return cls(own, span.start, np.frombuffer(joined, dtype="<u4"), offsets.astype(np.int64))

    def text_of(self, places: Ints) -> Ints:
        """Which text each place is in."""
        return np.searchsorted(self.offsets, places, side="right") - 1

    def prints(self, size: int, multipliers: Sequence[int]) -> tuple[Ints, NDArray[np.uint64]]:
        """(places, fingerprints) of all runs of ``size`` characters that lie within one text."""
        prints = self.characters.astype(np.uint64)
        ends = self.characters == 0
        length = 1
        for multiplier in multipliers:
            if length == size:
                break
            # Wraps around at 2^64, which is meant.
            prints = prints[:-length] * np.uint64(multiplier) + prints[length:]
            ends = ends[:-length] | ends[length:]
            length *= 2
        places = np.flatnonzero(~ends[: len(prints)])
        return places, prints[places]


def blocks(texts: Sequence[str], most: int) -> Iterator[range]:
    """Ranges of texts that have at most ``most`` characters together, or of one text."""
    start = characters = 0
    for index, text in enumerate(texts):
        if index > start and characters + len(text) >= most:
            yield range(start, index)
            start, characters = index, 0
        characters += len(text) + 1
    if len(texts) > start:
        yield range(start, len(texts))
