"""How documents are compared: with texts, with held-out documents, and with each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.errors import DataError
from common.site.audit.sources import OwnDocuments

PROBES = 2000
"""Bystanders, at most: enough to tell shares of some per cent."""

FEWEST_UNITS = 20
"""With fewer, documents can't stand in for held-out ones."""


@dataclass(frozen=True, repr=False)
class Groups:
    """Who is compared with whom. Private.

    Attributes
    ----------
    bystanders
        Documents as they look that can't have leaked from the others: what is found in them is what is found by chance.
        Held-out ones, or without those some of the site's own, for the documents of other units.
    beside
        Indices of the documents that bystanders are compared with.
    places
        Indices of the bystanders: in ``held_out``, or without it in the site's documents.
    paired, others
        Indices of as many documents as there are in ``held_out``, drawn by chance, and of all the others. With more to
        choose from, anything is nearer and shares more.
    held_out
        Held-out documents as they look, without those that are documents too; None if there are none at all.
    overlap
        How many are both.
    """

    bystanders: Sequence[str]
    beside: Sequence[int]
    places: Sequence[int]
    paired: Sequence[int]
    others: Sequence[int]
    held_out: Sequence[str] | None
    overlap: int

    @classmethod
    def of(cls, documents: OwnDocuments, holdout: Sequence[str] | None) -> Groups:
        """Draw the groups.

        Raises
        ------
        DataError
            If no held-out document remains beside those that are documents too.
        """
        # Drawn for a fair comparison, not for privacy: the same files give the same result.
        chance = np.random.default_rng(0)
        everyone = range(len(documents.texts))
        if holdout is None:
            places, beside = _probes(documents, chance)
            return cls([documents.texts[i] for i in places], beside, places, (), everyone, None, 0)
        kept, paired_from = _apart(documents, holdout)
        number = min(len(paired_from), len(kept))
        paired = sorted(paired_from[i] for i in chance.choice(len(paired_from), number, replace=False))
        held_out = [kept[i] for i in sorted(chance.choice(len(kept), number, replace=False))]
        others = sorted(set(everyone).difference(paired))
        places = sorted(chance.permutation(number)[:PROBES].tolist())
        bystanders = [held_out[i] for i in places]
        return cls(bystanders, everyone, places, paired, others, held_out, len(holdout) - len(kept))


def _apart(documents: OwnDocuments, holdout: Sequence[str]) -> tuple[list[str], list[int]]:
    """Held-out documents, and indices of documents, that aren't on both sides: those tell neither from the other."""
    ours, theirs = ({text.casefold() for text in texts} for texts in (documents.texts, holdout))
    kept = [text for text in holdout if text.casefold() not in ours]
    indices = [i for i, text in enumerate(documents.texts) if text.casefold() not in theirs]
    if not kept or not indices:
        raise DataError(
            f"held-out documents: all of the {len(holdout)}, or all of yours, are on both sides; documents that had no "
            "part in the study are needed"
        )
    return kept, indices


def _probes(documents: OwnDocuments, chance: np.random.Generator) -> tuple[list[int], list[int]]:
    """Indices of some documents, a fifth of the units at most, and of all documents of the other units."""
    units, unit_of = np.unique(documents.units, return_inverse=True)
    if units.size < FEWEST_UNITS:
        return [], []
    chosen = chance.permutation(units.size)[: min(PROBES, units.size // 5)]
    is_probe = np.isin(unit_of, chosen)
    return np.flatnonzero(is_probe)[:PROBES].tolist(), np.flatnonzero(~is_probe).tolist()
