"""Numbers with their 95 % interval. Texts are taken to be drawn independently of each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NORMAL_95 = 1.959964
RESAMPLES = 1000
GROUPS = 10
"""Of the jackknife: each is left out once."""


@dataclass(frozen=True)
class Estimate:
    """A number, and both ends of its interval if it has one."""

    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def within(cls, value: float, low: float, high: float) -> Estimate:
        """An interval is widened to hold its number: resampled ones may miss it at the edge of what is possible."""
        return cls(value, min(low, value), max(high, value))

    @classmethod
    def spread(cls, value: float, deviation: float, least: float = -np.inf, most: float = np.inf) -> Estimate:
        """By the number's standard deviation, cut to what is possible."""
        width = NORMAL_95 * deviation
        return cls.within(value, max(least, value - width), min(most, value + width))


def of_mean(points: NDArray[np.float64] | NDArray[np.bool_]) -> Estimate:
    """A mean of values of at least 0; of values up to 1, of a share, by Wilson's interval."""
    values = np.asarray(points, dtype=np.float64)
    number, mean, z = len(values), float(values.mean()), NORMAL_95
    if values.max() > 1:
        return Estimate.spread(mean, float(values.std() / np.sqrt(number)), least=0.0)
    middle = (mean + z * z / (2 * number)) / (1 + z * z / number)
    width = z / (1 + z * z / number) * float(np.sqrt(mean * (1 - mean) / number + z * z / (4 * number * number)))
    return Estimate.within(mean, max(0.0, middle - width), min(1.0, middle + width))


def of_resamples(value: float, resampled: Floats) -> Estimate:
    """From the number on resampled texts, ``(resamples,)``: its middle 95 %."""
    low, high = np.quantile(resampled, [0.025, 0.975])
    return Estimate.within(value, float(low), float(high))


def jackknife(measure: Callable[[NDArray[np.int64], NDArray[np.int64]], float], sizes: tuple[int, int]) -> float:
    """Standard deviation of a smooth number of two samples in random order, from leaving out a tenth of both at a time.

    The bootstrap is no use for distances: a text that is drawn twice is at distance 0 from itself.

    Parameters
    ----------
    measure
        Gives the number for the places that are kept in each sample.
    """
    values = np.array([measure(*(_kept(size, group) for size in sizes)) for group in range(GROUPS)])
    return float(np.sqrt((GROUPS - 1) * values.var()))


def _kept(size: int, group: int) -> NDArray[np.int64]:
    return np.flatnonzero(np.arange(size) % GROUPS != group)
