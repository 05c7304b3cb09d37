"""Made-up notes for tests of the leak check: same kind, nothing in common but words and phrases."""

from __future__ import annotations

import numpy as np

_PARTS = """
the patient|the nurse|the doctor|my mother|the ward|the team|the daughter|the clinic|our child|the consultant|the porter
waited for|asked about|was given|did not need|complained of|spoke about|was worried by|returned with|wrote down|missed
a cough|the tablets|an appointment|back pain|the parking|a scan of the knee|the new inhaler|cold meals|a fever|two falls
on arrival|last week|every night|since May|before lunch|for a month|yesterday|at home|in the evening|after all|by bus
"""


def notes(count: int, seed: int) -> list[str]:
    """Different notes of four sentences; those of another seed are others."""
    chance = np.random.default_rng(seed)
    return [" ".join(_sentence(chance) for _ in range(4)) for _ in range(count)]


def _sentence(chance: np.random.Generator) -> str:
    parts = [str(chance.choice(line.split("|"))) for line in _PARTS.strip().splitlines()]
    return f"{' '.join(parts).capitalize()}, {chance.integers(2, 99)} {chance.choice(['days', 'times', 'hours'])}."
