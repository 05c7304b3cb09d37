"""How far a leak check is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Progress = Callable[[str, float], None]
"""Called with what is being done and the share of it that is done."""

STEP = 256
"""Texts between two calls."""

_ItemT = TypeVar("_ItemT")


def counted(items: Sequence[_ItemT], stage: str, progress: Progress) -> Iterator[_ItemT]:
    """The items, one after the other, with word of how far they are."""
    for number, item in enumerate(items):
        if number % STEP == 0:
            progress(stage, number / len(items))
        yield item
    progress(stage, 1.0)
