"""The words of texts, and fingerprints of their sequences."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Prints = NDArray[np.uint64]

BLOCK = 1 << 20
"""Sequences that are looked up together."""

WORD = re.compile(r"\w+")

_MULTIPLIERS = np.random.default_rng(0).integers(1 << 63, size=64, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


@dataclass(frozen=True, repr=False, eq=False)
class Words:
    """The words of texts as 64-bit hashes, eight bytes each. Private where the texts are.

    ``hashes`` uint64 ``(words,)``, one text after the other; ``text`` int32 ``(words,)``, which one a word is of.
    """

    hashes: Prints
    text: NDArray[np.int32]
    texts: int

    @classmethod
    def of(cls, texts: Sequence[str]) -> Words:
        """Words of texts, without case."""
        # Python's own hash of a string: 64 bits, keyed anew in every process.
        each = [np.fromiter(map(hash, WORD.findall(text.casefold())), dtype=np.int64) for text in texts]
        hashes = np.concatenate([np.zeros(0, dtype=np.int64), *each]).view(np.uint64)
        text = np.repeat(np.arange(len(texts), dtype=np.int32), [len(own) for own in each])
        return cls(hashes, text, len(texts))

    def sequences(self, size: int) -> Iterator[tuple[Prints, NDArray[np.int32]]]:
        """(fingerprints, the text of each) of all runs of ``size`` words within one text, block by block."""
        for start in range(0, max(0, len(self.hashes) - size + 1), BLOCK):
            stop = min(start + BLOCK, len(self.hashes) - size + 1)
            prints = np.zeros(stop - start, dtype=np.uint64)
            for place in range(size):
                # Wraps around at 2^64, which is meant.
                prints += self.hashes[start + place : stop + place] * _MULTIPLIERS[place]
            text = self.text[start:stop]
            within = text == self.text[start + size - 1 : stop + size - 1]
            yield prints[within], text[within]
