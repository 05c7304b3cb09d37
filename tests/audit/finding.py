"""What an audit is and what it found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[float], None]
"""Called now and then with the share that is done, 0 to 1."""


@dataclass(frozen=True)
class Measurement:
    """A claim, what was measured, and whether the second refutes the first."""

    claim: str
    measured: str
    refuted: bool


@dataclass(frozen=True)
class Audit:
    """One mechanism to measure: as it ships if ``changed`` is empty, else its twin with a protection off."""

    mechanism: str
    changed: str
    measure: Callable[[Progress], Measurement]

    @property
    def name(self) -> str:
        """For progress."""
        return f"{self.mechanism}: {self.changed or 'as it ships'}"


@dataclass(frozen=True)
class Finding:
    """An audit with its measurement."""

    audit: Audit
    measurement: Measurement

    @property
    def ok(self) -> bool:
        """A mechanism as it ships mustn't be refuted, a twin must."""
        return self.measurement.refuted == bool(self.audit.changed)

    @property
    def verdict(self) -> str:
        """One word; in capitals what mustn't be."""
        if self.audit.changed:
            return "caught" if self.ok else "MISSED"
        return "holds" if self.ok else "REFUTED"


def quiet(_: float) -> None:
    """Progress for nobody."""
