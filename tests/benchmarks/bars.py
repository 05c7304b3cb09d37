"""A bar: a measured value and the limit it must keep."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bar:
    """``value`` must be at most ``limit``, or at least it if ``at_least``."""

    name: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def ok(self) -> bool:
        """Whether the bar is met."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        return f"BAR {self.name} value={self.value:.4g} limit={self.limit:.4g} {'ok' if self.ok else 'short'}"
