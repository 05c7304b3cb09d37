"""Private values and noised values are different types, and neither can pass for the other.

`ExactCounts` holds what nobody outside may see; its ``repr`` shows sizes only. `Noised` holds an array that a
mechanism of `common.privacy.noise` has put its noise on; nothing else can make one. The door (`common.site.door`)
releases `Noised` values and refuses everything else, so an exact value can't be put into a reply by accident.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import PrivacyError

Counts = NDArray[np.int64]

_MECHANISM = object()
"""Held by this package alone: the right to call a value noised."""


@dataclass(frozen=True, repr=False)
class ExactCounts:
    """Private integer counts, int64 of shape ``(cells,)``, and how far one privacy unit can move them.

    Attributes
    ----------
    counts
        Exact counts. Private.
    cells_per_unit
        Most cells that adding or removing one unit changes, each by exactly 1. So the L2 sensitivity is
        ``sqrt(cells_per_unit)``. Public.
    """

    counts: Counts
    cells_per_unit: int

    def __repr__(self) -> str:
        return f"ExactCounts(<{self.counts.size} private cells>, cells_per_unit={self.cells_per_unit})"


class Noised:
    """An array that carries its noise already; safe to release. Made by the mechanisms of `common.privacy.noise`."""

    __slots__ = ("_array",)

    def __init__(self, array: NDArray[Any], *, mechanism: object) -> None:
        if mechanism is not _MECHANISM:
            raise PrivacyError("Noised: made outside common.privacy; only a noise mechanism may call a value noised")
        frozen = np.array(array, copy=True)
        frozen.setflags(write=False)
        self._array = frozen

    @property
    def array(self) -> NDArray[Any]:
        """The noised values, read-only."""
        return self._array

    def __repr__(self) -> str:
        return f"Noised({self._array.dtype}, shape={self._array.shape})"


def noised(array: NDArray[Any]) -> Noised:
    """For the mechanisms of this package: mark ``array`` as noised."""
    return Noised(array, mechanism=_MECHANISM)


def post_process(function: Callable[[Sequence[NDArray[Any]]], NDArray[Any]], values: Sequence[Noised]) -> Noised:
    """Apply ``function`` to noised values; by post-processing the result costs nothing.

    ``function`` must depend on its argument and on public values only. That can't be checked by a type, so every
    call of this function is a line an auditor reads.

    Raises
    ------
    PrivacyError
        If there is no noised value to process: then the result can't be one.
    """
    if not values:
        raise PrivacyError("post_process: no noised value was given; at least one is needed")
    return noised(function([value.array for value in values]))
