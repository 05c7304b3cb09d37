"""The range that a number is read in: what a bad corpus would have, and what real text has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from server.evaluation.intervals import Estimate
from server.quality import QualityNumber


@dataclass(frozen=True)
class End:
    """One end of a range.

    Attributes
    ----------
    words
        What has this number.
    """

    value: float
    words: str


PERFECT = End(1.0, "perfect")
WORST = End(0.0, "worst possible")


def ranged(
    name: str,
    found: Estimate | float,
    bad: End,
    good: End,
    *,
    limits: tuple[float, float] = (0.0, 1.0),
    direction: Literal["higher", "lower"] = "higher",
    note: str = "",
) -> QualityNumber:
    """A number in its range.

    Ends that are the wrong way round say nothing: where what should be bad isn't worse than what should be good, the
    number is read against the best and worst that is possible, and the note says so.

    Parameters
    ----------
    limits
        Worst and best that is possible, the smaller first.
    """
    estimate = found if isinstance(found, Estimate) else Estimate(found)
    said = [f"{'floor' if direction == 'higher' else 'ceiling'}: {bad.words}", ""]
    said[1] = f"{'ceiling' if direction == 'higher' else 'floor'}: {good.words}"
    low, high = (bad.value, good.value) if direction == "higher" else (good.value, bad.value)
    if not low < high:
        said = [
            f"no range: {bad.words} has {bad.value:.3g}, which is no worse than {good.words} ({good.value:.3g}); shown "
            "from the least to the most possible"
        ]
        low, high = limits
    return QualityNumber(
        name=name,
        value=estimate.value,
        low=estimate.low,
        high=estimate.high,
        floor=low,
        ceiling=high,
        direction=direction,
        note="; ".join([*said, *([note] if note else [])]),
    )
