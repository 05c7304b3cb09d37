"""What a leak check found: numbers and row numbers. Texts that documents have too are kept apart from what is printed.

All of it is private: it depends on documents and carries no noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from common.site.audit.limits import Limits

_NORMAL_95 = 1.959964


class Found(BaseModel):
    """A part of what was found."""

    model_config = ConfigDict(frozen=True)


class Spread(Found):
    """How a number is spread over texts."""

    median: float = Field(description="Half of the texts have no more.")
    nine_in_ten: float = Field(description="90 % of the texts have no more.")
    ninety_nine: float = Field(description="99 % of the texts have no more.")
    most: float = Field(description="The largest.")

    @classmethod
    def of(cls, values: NDArray[np.number] | Sequence[float]) -> Self:
        """The spread of at least one value."""
        median, nine, ninety, most = np.quantile(np.asarray(values, dtype=np.float64), [0.5, 0.9, 0.99, 1]).tolist()
        return cls(median=median, nine_in_ten=nine, ninety_nine=ninety, most=most)


class LowEnd(Found):
    """How the smallest of the texts' numbers are spread."""

    least: float = Field(description="The smallest.")
    one_in_hundred: float = Field(description="1 % of the texts have no more.")
    one_in_ten: float = Field(description="10 % of the texts have no more.")
    median: float = Field(description="Half of the texts have no more.")

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> Self:
        """The low end of at least one value."""
        least, one, ten, median = np.quantile(values, [0, 0.01, 0.1, 0.5]).tolist()
        return cls(least=least, one_in_hundred=one, one_in_ten=ten, median=median)


class Interval(Found):
    """A number with its 95% interval, as if texts were independent of each other."""

    value: float
    low: float
    high: float

    @classmethod
    def of_share(cls, points: NDArray[np.float64]) -> Self:
        """Of a mean of values from 0 to 1 (Wilson)."""
        number, mean, z = len(points), float(points.mean()), _NORMAL_95
        middle = (mean + z * z / (2 * number)) / (1 + z * z / number)
        width = z / (1 + z * z / number) * float(np.sqrt(mean * (1 - mean) / number + z * z / (4 * number * number)))
        return cls(value=mean, low=max(0.0, middle - width), high=min(1.0, middle + width))

    @classmethod
    def of_ratio(cls, parts: NDArray[np.int64], totals: NDArray[np.int64]) -> Self:
        """Of a sum over a sum of positive numbers, one of each for every text."""
        total = float(totals.sum())
        ratio = float(parts.sum()) / total
        width = _NORMAL_95 * float(np.sqrt(((parts - ratio * totals) ** 2).sum())) / total
        return cls(value=ratio, low=ratio - width, high=ratio + width)


class Suspect(Found):
    """A text with a long run that few documents have."""

    row: int = Field(description="Row of the corpus, from 1.")
    characters: int = Field(description="Length of the run.")
    words: int = Field(description="Whole words in it.")
    whole: bool = Field(description="Whether the run is all of the text.")
    units: int = Field(description="Privacy units and held-out documents that have it.")
    run: str = Field(exclude=True, repr=False, description="The run: text of a document.")


class RunsFound(Found):
    """Longest shared runs of characters."""

    characters: Spread = Field(description="Of each text's longest run that a document has.")
    words: Spread = Field(description="Whole words in them.")
    identical: int = Field(description="Texts that are a document as a whole, short ones too.")
    suspects: tuple[Suspect, ...] = Field(description="Long runs that few documents have, longest first.")
    common: int = Field(description="Texts with long runs that many documents have, and no other long run.")
    bystanders: Spread | None = Field(description="Characters that bystanders share with documents.")
    bystander_suspects: int | None = Field(description="Bystanders that would be suspects.")
    paired: Spread | None = Field(description="Characters shared with as many documents as are held out.")
    held_out: Spread | None = Field(description="Characters shared with held-out documents.")


class SequencesFound(Found):
    """Sequences of words that documents have too."""

    words: int = Field(description="Words of a sequence.")
    sequences: int = Field(description="Sequences of all texts.")
    share: float = Field(description="Share of them that is in documents.")
    bystanders: float | None = Field(description="Share of the bystanders' sequences that is in documents.")
    paired: float | None = Field(default=None, description="Share in as many documents as are held out.")
    held_out: float | None = Field(default=None, description="Share in held-out documents.")
    excess: Interval | None = Field(default=None, description="The difference of the two.")
    only_documents: float | None = Field(
        default=None, description="Share of texts with a sequence that as many documents have, and no held-out one."
    )
    only_held_out: float | None = Field(
        default=None,
        description="Share of texts with a sequence that held-out documents have, and none of as many documents.",
    )


class NeighboursFound(Found):
    """Distances to the nearest documents, in embedding space."""

    embedder: str = Field(description="The embedder.")
    distance: LowEnd = Field(description="To the nearest document: 0 is the same, 1.4 unrelated.")
    ratio: Spread = Field(description="1 minus nearest over second nearest document: 0 is no one's in particular.")
    bystander_distance: LowEnd | None = Field(description="Distance of bystanders to the nearest document.")
    bystander_ratio: Spread | None = Field(description="The ratio of bystanders.")
    nearer: Interval | None = Field(description="Share of texts nearer to documents than to as many held-out ones.")


class IdentifiersFound(Found):
    """Personal identifiers of one kind."""

    kind: str = Field(description="What they are.")
    identifying: bool = Field(description="Whether one by itself may point to a person; else they are counted only.")
    distinct: int = Field(description="Different ones in the texts.")
    rows: tuple[int, ...] = Field(description="Rows of the corpus that have any.")
    in_documents: int = Field(description="Different ones that are in documents too.")
    rare: int = Field(description="Of these, those in documents of few units.")
    rare_rows: tuple[int, ...] = Field(description="Rows of the corpus with one of those.")
    by_chance: float = Field(description="How many such ones to expect, by the share of the bystanders' that are such.")
    bystanders: int = Field(description="Different ones in bystanders.")
    written: tuple[str, ...] = Field(exclude=True, repr=False, description="Rare ones, as the texts write them.")


class LeakCheck(Found):
    """What a leak check found. Private."""

    texts: int = Field(description="Texts of the corpus.")
    unreadable: int = Field(description="Rows of the corpus without a readable text.")
    documents: int = Field(description="Documents of the site that were compared.")
    units: int = Field(description="Their privacy units.")
    held_out: int | None = Field(description="Held-out documents that were compared, if there are any.")
    overlap: int = Field(description="Held-out documents that are among the documents too, and were left out.")
    bystanders: int = Field(
        description="Documents that can't have leaked from those they are compared with: held-out ones, or "
        "without those some of the site's own for those of other units."
    )
    runs: RunsFound
    sequences: tuple[SequencesFound, ...]
    neighbours: NeighboursFound
    identifiers: tuple[IdentifiersFound, ...]
    limits: Limits
    findings: tuple[str, ...] = Field(description="What a person should look at, in words without any text.")
    caution: str = Field(description="What this result is not, and where it must not go.")
