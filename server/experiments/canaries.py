"""Secrets that are made up and planted among a site's documents, to see whether anything that leaves gives them away.

Carlini et al. 2019: a canary is a sentence with a random number in it. Whether a model or a corpus knows it is seen
beside references, the same sentence with numbers that nobody planted: `server.evaluation.leakage.exposure`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from common.models.embedder import visible

REFERENCES = 1023
"""So that the most that can be seen is 10 bits."""

_DIGITS = 9


@dataclass(frozen=True)
class Canaries:
    """Sentences that differ in their number only.

    Attributes
    ----------
    planted
        Those that a site holds.
    references
        Those that nobody holds.
    code
        The attributes' values that all of them have.
    """

    planted: tuple[str, ...]
    references: tuple[str, ...]
    code: Mapping[str, str]

    @classmethod
    def made_up(cls, number: int, code: Mapping[str, str], seed: int) -> Canaries:
        """As many to plant, and the references."""
        # A number that is drawn twice would be planted and a reference at once.
        drawn = np.random.default_rng(seed).choice(10**_DIGITS, number + REFERENCES, replace=False)
        sentences = tuple(visible(_sentence(int(secret))) for secret in drawn)
        return cls(sentences[:number], sentences[number:], code)

    @property
    def all(self) -> tuple[str, ...]:
        """Planted ones first."""
        return (*self.planted, *self.references)

    @property
    def sha256(self) -> str:
        """Hash of all of them with their code."""
        return hashlib.sha256(json.dumps([self.planted, self.references, dict(self.code)]).encode()).hexdigest()

    def rows(self, copies: int, patients: str | None) -> Iterator[Mapping[str, str]]:
        """Documents that say each so many times.

        Parameters
        ----------
        patients
            Column of the patient, where documents have one: all that say the same are one patient's.
        """
        for place, text in enumerate(self.planted):
            patient = {} if patients is None else {patients: f"canary {place}"}
            yield from [{"text": text, **self.code, **patient}] * copies


def _sentence(secret: int) -> str:
    digits = f"{secret:0{_DIGITS}}"
    # Early, as models are given the beginning of a long document.
    return f"My number is {' '.join(digits[i : i + 3] for i in range(0, _DIGITS, 3))}, please ring me back."
