"""What a person should look at: sentences with numbers and rows, without any text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from common.site.audit.found import IdentifiersFound, LeakCheck

NAMED_ROWS = 20
"""Rows that a sentence names; it counts the rest."""

_DEVIATIONS = 3
"""By which a number that chance makes may be larger than expected."""


def findings(check: LeakCheck) -> tuple[str, ...]:
    """What is above the limits."""
    return tuple(_findings(check))


def rows_named(rows: Sequence[int]) -> str:
    """Rows of the corpus, in words."""
    more = f" and {len(rows) - NAMED_ROWS} more" if len(rows) > NAMED_ROWS else ""
    return f"row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows[:NAMED_ROWS]))}{more}"


def most_by_chance(kind: IdentifiersFound) -> float:
    """Rare identifiers that chance may explain: a Poisson number, with three standard deviations."""
    return kind.by_chance + _DEVIATIONS * math.sqrt(kind.by_chance)


def _findings(check: LeakCheck) -> Iterator[str]:
    limits = check.limits
    copied = sorted({suspect.row for suspect in check.runs.suspects})
    if copied:
        share = "texts share" if len(copied) > 1 else "text shares"
        yield (
            f"{len(copied)} {share} a run of {limits.shared_characters} characters or more, or all there is, with "
            f"documents of fewer than {limits.common_units} units: {rows_named(copied)}"
        )
    for part in check.sequences:
        if part.excess is not None and part.excess.low > limits.overlap_excess:
            yield (
                f"{part.excess.value:.1%} of the texts' sequences of {part.words} words are in documents beyond "
                f"what is in as many held-out ones; surely more than {limits.overlap_excess:.1%}"
            )
    nearer = check.neighbours.nearer
    if nearer is not None and nearer.low > limits.nearer_share:
        yield (
            f"{nearer.value:.1%} of the texts are nearer to documents than to as many held-out ones; surely more than "
            f"{limits.nearer_share:.1%}"
        )
    for kind in check.identifiers:
        if kind.identifying and kind.rare > limits.rare_identifiers + most_by_chance(kind):
            are = "are" if kind.rare > 1 else "is"
            yield (
                f"{kind.kind}: {kind.rare} of {kind.distinct} different ones {are} also in documents of fewer than "
                f"{limits.common_units} units, {kind.by_chance:.1f} expected by chance: "
                f"{rows_named(kind.rare_rows)}"
            )
