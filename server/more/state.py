"""Where a generation stands, after each shard: what makes it the same one, and which texts are taken.

Texts are ordered in rounds. The first orders all of them; a later one what is missing then, as a text may fail all its
tries by bad luck. A code of which most texts fail is given up: what it lacks is reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from server.filters import Drops
from server.more.plan import shard_sizes, shards_for

Counts = NDArray[np.int64]

ROUNDS = 4
"""Rounds at most: a text that fails has so many times the tries of the study."""

_ENOUGH = 16
"""Texts of a code that have to be ordered before it can be given up, if less than half of them come."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Settings(_Frozen):
    """What makes a generation the same one."""

    run_id: str = Field(description="Name of the run.")
    study_sha256: str = Field(description="Hash of its study.")
    adapter_sha256: str = Field(description="Hash of its adapter.")
    texts: int = Field(ge=1, description="Texts that were asked for.")


class State(_Frozen):
    """``generation.json``. Vectors are by code."""

    format: Literal[1] = Field(default=1, description="Of this file.")
    settings: Settings = Field(description="What makes it the same generation.")
    series: int = Field(ge=1, description="Which generation of the run it is: another one gives other texts.")
    texts_per_shard: int = Field(ge=1, description="Texts of a shard, about.")
    quotas: tuple[int, ...] = Field(description="Texts wanted.")
    made: tuple[int, ...] = Field(description="Texts made.")
    given_up: tuple[int, ...] = Field(default=(), description="Indices of codes that are given up.")
    round: int = Field(default=0, ge=0, description="Round, counted from 0.")
    ordered: tuple[int, ...] = Field(description="Texts that the round orders.")
    shard: int = Field(default=0, ge=0, description="Shards of the round that are done.")
    files: tuple[int, ...] = Field(default=(), description="Texts of each file.")
    dropped: Mapping[str, int] = Field(default={}, description="Texts that weren't kept, by reason.")
    cut: int = Field(default=0, ge=0, description="Texts that were kept though the length limit cut them.")
    finished: bool = Field(default=False, description="Whether there is nothing left to do.")

    @classmethod
    def begin(cls, settings: Settings, series: int, texts_per_shard: int, quotas: Counts) -> State:
        """Before anything is made."""
        wanted = tuple(quotas.tolist())
        return cls(
            settings=settings, series=series, texts_per_shard=texts_per_shard, quotas=wanted, ordered=wanted,
            made=(0,) * len(wanted),
        )  # fmt: skip

    @property
    def texts(self) -> int:
        """Texts made so far."""
        return sum(self.files)

    @property
    def place(self) -> str:
        """A name for the shard that is next; no two have the same."""
        return f"more {self.series}, round {self.round}, shard {self.shard}"

    @property
    def next_texts(self) -> Counts:
        """Texts of each code in the shard that is next, int64 ``(codes,)``."""
        ordered = np.array(self.ordered, dtype=np.int64)
        sizes = shard_sizes(ordered, self.shard, shards_for(ordered, self.texts_per_shard))
        sizes[list(self.given_up)] = 0
        return sizes

    def after(self, codes: Counts, drops: Drops) -> State:
        """With the next shard done.

        Parameters
        ----------
        codes
            Code index of each text in it, int64 ``(texts,)``.
        drops
            What wasn't kept for it.
        """
        wanted, come = self.next_texts, np.bincount(codes, minlength=len(self.quotas))
        failing = np.flatnonzero((wanted >= _ENOUGH) & (2 * come < wanted))
        dropped = {**self.dropped}
        for reason, count in drops.counts.items():
            dropped[reason] = dropped.get(reason, 0) + count
        done = self.model_copy(
            update={
                "made": tuple((np.array(self.made) + come).tolist()),
                "given_up": tuple(sorted({*self.given_up, *failing.tolist()})),
                "shard": self.shard + 1,
                "files": (*self.files, codes.size) if codes.size else self.files,
                "dropped": dropped,
                "cut": self.cut + drops.cut,
            }
        )
        over = done.shard == shards_for(np.array(self.ordered), self.texts_per_shard)
        return done._next_round() if over else done

    def _next_round(self) -> State:
        missing = np.array(self.quotas) - np.array(self.made)
        missing[list(self.given_up)] = 0
        if self.round + 1 == ROUNDS or not missing.any():
            return self.model_copy(update={"finished": True})
        return self.model_copy(update={"round": self.round + 1, "shard": 0, "ordered": tuple(missing.tolist())})
