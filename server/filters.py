"""Which generated texts aren't kept, and why. Rules of public text and public thresholds: nothing private is looked at.

A new rule is a line in one of two methods of `Filters`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from common.codes import ControlCodes
from common.study import Pool
from server.seen import NearTexts, SeenTexts

EMPTY, ECHO, REPETITIVE = "empty", "prompt echo", "repeated n-grams"
OVER_LONG, DUPLICATE, NEAR = "over-long", "duplicate", "near duplicate"

_WORDS = 4
"""Of the n-grams that a text shouldn't repeat."""


@dataclass
class Drops:
    """Why generated texts weren't kept.

    Attributes
    ----------
    counts
        Texts by reason.
    cut
        Texts that were kept though the length limit cut them.
    """

    counts: Counter[str] = field(default_factory=Counter)
    cut: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in sorted(self.counts.items())) or "none"


class Filters:
    """What is dropped under a study's options, and what was kept so far.

    Parameters
    ----------
    codes, options
        The study's.
    expected
        Texts that may be kept; memory for near duplicates goes by it, up to a limit (see `NearTexts`).
    """

    def __init__(self, codes: ControlCodes, options: Pool, expected: int) -> None:
        self._options, self._echoes = options, lru_cache(maxsize=1024)(lambda code: _echoes(codes, code))
        self._seen = SeenTexts()
        self._near = NearTexts(options.near_duplicate, expected) if options.near_duplicate < 1 else None

    @property
    def kept(self) -> int:
        """Number of distinct texts that were kept."""
        return len(self._seen)

    def reason(self, text: str, code: int, *, ended: bool) -> str:
        """Why a text isn't kept; empty if it is, and then it is remembered.

        Parameters
        ----------
        ended
            Whether the model ended it; else the length limit cut it.
        """
        if not ended and self._options.over_long == "drop":
            return OVER_LONG
        folded = text.casefold()
        reason = self._by_itself(folded, code) or self._beside_others(folded, code)
        if not reason:
            self._seen.add(_digest(folded))
        return reason

    def _by_itself(self, folded: str, code: int) -> str:
        if not any(character.isalnum() for character in folded):
            return EMPTY
        if any(echo in folded for echo in self._echoes(code)):
            return ECHO
        return REPETITIVE if repetition(folded) > self._options.max_repetition else ""

    def _beside_others(self, folded: str, code: int) -> str:
        if _digest(folded) in self._seen:
            return DUPLICATE
        return NEAR if self._near is not None and self._near.add(folded, code) else ""

    def remember(self, text: str, code: int) -> None:
        """Take a text for kept, whatever the rules say."""
        folded = text.casefold()
        self._seen.add(_digest(folded))
        if self._near is not None:
            self._near.add(folded, code)


def repetition(text: str) -> float:
    """Share of a text's n-grams of four words that were there before in it, 0 to 1; 0 for a shorter text."""
    words = text.split()
    grams = [tuple(words[i : i + _WORDS]) for i in range(len(words) - _WORDS + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _echoes(codes: ControlCodes, code: int) -> tuple[str, ...]:
    """What a text that repeats its condition, instead of following it, has in it."""
    lines = (line.casefold() for line in codes.prompt(code).splitlines() if line.strip())
    preamble = (codes.preamble.casefold(),) if codes.preamble else ()
    return (*(line for line in lines if ": " in line or line == "text:"), *preamble)


def _digest(folded: str) -> np.uint64:
    found = hashlib.blake2b(folded.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return np.uint64(int.from_bytes(found, "big"))
