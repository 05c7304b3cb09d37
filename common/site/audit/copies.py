"""Runs of characters that texts share with documents; long ones that few documents have are what copies look like."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.site.audit.found import RunsFound, Spread, Suspect
from common.site.audit.groups import Groups
from common.site.audit.limits import Limits
from common.site.audit.sources import OwnDocuments, Texts
from common.site.audit.stages import Progress
from common.site.audit.substrings import SHORTEST, SharedRuns, longest_shared
from common.site.audit.words import WORD

ROUNDS = 6
"""Runs of one text that are looked at, if all before are boilerplate."""

MOST_COUNTED = 2000
"""Different runs that are looked for in every document, longest first. Others count as rare: where so much is shared,
boilerplate is not the question."""

_CUT = "\0"
"""In place of a run that was cut out: no text and no document has it."""


def runs_found(corpus: Texts, documents: OwnDocuments, groups: Groups, limits: Limits, progress: Progress) -> RunsFound:
    """Longest shared runs of a corpus, and of bystanders."""
    texts, folded = _folded(corpus.texts), _folded(documents.texts)
    held_out = _folded(groups.held_out or ())
    paired = longest_shared(texts, _chosen(folded, groups.paired))
    others = longest_shared(
        texts, _chosen(folded, groups.others), progress=lambda share: progress("runs shared with documents", share)
    )
    runs = paired.longer(others)
    holders = Holders(folded, documents.units, held_out, limits.common_units)
    found, common = suspects(texts, corpus.rows, folded, runs, holders, limits)
    known = set(folded)
    of_bystanders, suspected = _of_bystanders(documents.units, folded, held_out, groups, limits, progress)
    starts, lengths = runs.starts.tolist(), runs.lengths.tolist()
    return RunsFound(
        characters=Spread.of(runs.lengths),
        words=Spread.of([words_of(*run) for run in zip(texts, starts, lengths, strict=True)]),
        identical=sum(text in known for text in texts),
        suspects=tuple(found),
        common=common,
        bystanders=of_bystanders,
        bystander_suspects=suspected,
        paired=Spread.of(paired.lengths) if held_out else None,
        held_out=Spread.of(longest_shared(texts, held_out).lengths) if held_out else None,
    )


class Holders:
    """Who has a run: documents and held-out ones, as they look, without case. Private.

    Parameters
    ----------
    most
        Holders that make a run common.
    own
        How many holders are the text itself, which don't count.
    """

    def __init__(
        self, documents: Sequence[str], units: NDArray[np.int64], held_out: Sequence[str], most: int, own: int = 0
    ) -> None:
        first_free = int(units.max(initial=-1)) + 1
        self._owned = [
            *zip(documents, units.tolist(), strict=True),
            *((text, first_free + i) for i, text in enumerate(held_out)),
        ]
        self._most, self._own = most + own, own
        self._known: dict[str, int] = {}

    def number(self, run: str) -> int:
        """Units and held-out documents that have a run, at most as many as make it common."""
        # Beside a template, chance may add some characters that few share.
        core = run[SHORTEST:-SHORTEST] if len(run) >= 3 * SHORTEST else run
        if core not in self._known:
            self._known[core] = self._counted(core) if len(self._known) < MOST_COUNTED else 1 + self._own
        return self._known[core] - self._own

    def _counted(self, core: str) -> int:
        units: set[int] = set()
        for text, unit in self._owned:
            if core in text:
                units.add(unit)
                if len(units) == self._most:
                    break
        return len(units)


def suspects(
    texts: Sequence[str],
    rows: Sequence[int],
    documents: Sequence[str],
    runs: SharedRuns,
    holders: Holders,
    limits: Limits,
) -> tuple[list[Suspect], int]:
    """Texts with long runs that few documents have, longest first, and how many texts have none but common ones.

    A run that many documents have is cut out of its text, and what remains is looked at again: a template must not hide
    a copy beside it.

    Parameters
    ----------
    texts, rows
        Texts as they look, without case, and their rows in the corpus.
    documents
        Documents as they look, without case. Private.
    runs
        Each text's longest run that a document has. Private.
    """
    found: list[Suspect] = []
    remaining = dict(enumerate(texts))
    common: set[int] = set()
    for _ in range(ROUNDS):
        again: dict[int, str] = {}
        for i, start, length in _long(remaining, runs, limits):
            text = remaining[i]
            units = holders.number(text[start : start + length])
            if units < limits.common_units:
                found.append(_suspect(rows[i], texts[i], text, start, length, units))
            else:
                again[i] = text[:start] + _CUT + text[start + length :]
        common |= again.keys()
        remaining = again
        if not remaining:
            break
        runs = longest_shared(list(remaining.values()), documents)
    named = {suspect.row for suspect in found}
    return sorted(found, key=lambda s: -s.characters), sum(rows[i] not in named for i in common)


def words_of(text: str, start: int, length: int) -> int:
    """Whole words in a run of a text."""
    end = start + length
    words = len(WORD.findall(text, start, end))
    cut = sum(0 < at < len(text) and bool(WORD.fullmatch(text, at - 1, at + 1)) for at in {start, end})
    return max(0, words - cut)


def _long(texts: dict[int, str], runs: SharedRuns, limits: Limits) -> list[tuple[int, int, int]]:
    """(text, start, length) of runs that are long, or are all that a text has; longest first."""
    of_runs = zip(texts.items(), runs.starts.tolist(), runs.lengths.tolist(), strict=True)
    long = [
        (i, start, length)
        for (i, text), start, length in of_runs
        if length >= limits.shared_characters or (length == len(text) and length >= limits.whole_characters)
    ]
    return sorted(long, key=lambda run: -run[2])


def _suspect(row: int, whole: str, text: str, start: int, length: int, units: int) -> Suspect:
    return Suspect(
        row=row,
        characters=length,
        words=words_of(text, start, length),
        whole=length == len(whole),
        units=units,
        run=text[start : start + length],
    )


def _of_bystanders(
    units: NDArray[np.int64],
    folded: Sequence[str],
    held_out: Sequence[str],
    groups: Groups,
    limits: Limits,
    progress: Progress,
) -> tuple[Spread | None, int | None]:
    """What bystanders share, and how many would be suspects."""
    if not groups.bystanders:
        return None, None
    texts, beside = _folded(groups.bystanders), _chosen(folded, groups.beside)
    runs = longest_shared(texts, beside, progress=lambda share: progress("runs that documents share anyway", share))
    # A held-out bystander is itself one of the held-out documents.
    own = 1 if held_out else 0
    holders = Holders(beside, units[list(groups.beside)], held_out, limits.common_units, own)
    found, _ = suspects(texts, range(len(texts)), beside, runs, holders, limits)
    return Spread.of(runs.lengths), len({suspect.row for suspect in found})


def _folded(texts: Sequence[str]) -> list[str]:
    return [text.casefold() for text in texts]


def _chosen(texts: Sequence[str], indices: Sequence[int]) -> list[str]:
    return [texts[i] for i in indices]
