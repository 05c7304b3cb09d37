"""Quality numbers of a corpus: each with the range that it has to be read in, and the end of it that is good.

An evaluation writes ``evaluation.json`` into the run folder; the report shows it.

    write_quality(workspace, Quality(numbers=(
        QualityNumber(name="topic accuracy of a classifier trained on the corpus", value=0.71, low=0.68, high=0.74,
                      floor=0.11, ceiling=0.86, direction="higher", note="floor: always the largest topic"),
    )))
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from common.configuration import first_problem
from common.errors import DataError
from server.workspace import Workspace, write_atomically


class QualityNumber(BaseModel):
    """One number about the corpus. It may lie outside its floor and ceiling; it is within its own interval."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(min_length=1, description="What was measured, in words.")
    value: float = Field(description="The number.")
    low: float | None = Field(default=None, description="Lower end of its 95 % interval; unset if there is none.")
    high: float | None = Field(default=None, description="Upper end of the same.")
    floor: float = Field(description="Lower end of the range to read it in, e.g. what chance gives.")
    ceiling: float = Field(description="Upper end of the same, e.g. what the real text gives.")
    direction: Literal["higher", "lower"] = Field(description="Which end is good.")
    note: str = Field(default="", description="What floor and ceiling are, and what else a reader must know.")

    @model_validator(mode="after")
    def _in_order(self) -> QualityNumber:
        if not self.floor < self.ceiling:
            raise ValueError(
                f"floor is {self.floor:g} and ceiling {self.ceiling:g}; the floor has to be below the ceiling, also "
                "where lower is better"
            )
        if (self.low is None) != (self.high is None):
            raise ValueError("low or high is missing; an interval has both ends")
        if self.low is not None and self.high is not None and not self.low <= self.value <= self.high:
            raise ValueError(f"value is {self.value:g}, outside its interval {self.low:g} to {self.high:g}")
        return self

    def share(self, value: float) -> float:
        """How far a value is from the bad end (0) of the range to the good end (1); outside of it beyond 0 or 1."""
        up = (value - self.floor) / (self.ceiling - self.floor)
        return up if self.direction == "higher" else 1 - up


class Quality(BaseModel):
    """``evaluation.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    numbers: tuple[QualityNumber, ...] = Field(description="In the order they are shown in.")
    note: str = Field(default="", description="What was evaluated, and against which texts.")


def write_quality(workspace: Workspace, quality: Quality) -> None:
    """Write ``evaluation.json``."""
    write_atomically(workspace.quality, quality.model_dump_json(indent=1).encode())


def read_quality(workspace: Workspace) -> Quality | None:
    """Read ``evaluation.json``; None if the corpus wasn't evaluated.

    Raises
    ------
    DataError
        If the file isn't one of quality numbers.
    """
    if not workspace.quality.is_file():
        return None
    try:
        return Quality.model_validate_json(workspace.quality.read_bytes())
    except ValidationError as cause:
        raise DataError(f"{workspace.quality}: not quality numbers: {first_problem(cause)}") from cause
    except OSError as cause:
        raise DataError(f"{workspace.quality}: can't be read: {cause.strerror}") from cause
