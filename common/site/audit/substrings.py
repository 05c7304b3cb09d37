"""The longest run of characters that each synthetic text shares with any document: exact, in bounded memory.

Runs are grown by doubling. Every run of 16 characters has a fingerprint; places whose run occurs on both sides stay and
get a name, one for each distinct run. A run of 32 characters is a pair of names, which gets a name in turn, and so on
until no text shares a longer one; between the last length and its double, bits of the length are found one by one.
Only what is on both sides goes on, so that the work shrinks from step to step. A text that is a copy as a whole takes
no more steps than the logarithm of its length.

Both sides are cut into blocks, and each pair of blocks is looked at by itself: memory is that of two blocks.

    runs = longest_shared(synthetic, documents)
    synthetic[0][runs.starts[0] : runs.starts[0] + runs.lengths[0]]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.site.audit.sides import Ints, Side, blocks, multipliers

Names = NDArray[np.int32]

SHORTEST = 16
"""Characters of the shortest run that is looked for, a power of two: any two texts of a language share shorter ones."""

BLOCK = 1 << 21
"""Characters of each side that are compared at once; together they take about 200 MB. A longer text goes alone."""

NOWHERE = -1


@dataclass(frozen=True, repr=False, eq=False)
class SharedRuns:
    """Each text's longest run that a document has too. Private; all int64 ``(texts,)``.

    Attributes
    ----------
    lengths
        Characters; 0 where not even `SHORTEST` of them are shared.
    starts
        Where the run begins in the text.
    documents, places
        One document that has the run, or `NOWHERE`, and where it begins there.
    """

    lengths: Ints
    starts: Ints
    documents: Ints
    places: Ints

    def __repr__(self) -> str:
        return f"SharedRuns(<of {len(self.lengths)} texts>)"

    @classmethod
    def none(cls, texts: int) -> SharedRuns:
        """Nothing shared so far."""
        return cls(*(np.full(texts, value, dtype=np.int64) for value in (0, 0, NOWHERE, 0)))

    def longer(self, other: SharedRuns) -> SharedRuns:
        """The longer of two runs of each text; of equals the one from here."""
        pairs = ((self.lengths, other.lengths), (self.starts, other.starts))
        more = ((self.documents, other.documents), (self.places, other.places))
        return SharedRuns(*(np.where(other.lengths > self.lengths, b, a) for a, b in (*pairs, *more)))


def longest_shared(
    texts: Sequence[str],
    documents: Sequence[str],
    *,
    shortest: int = SHORTEST,
    block: int = BLOCK,
    progress: Callable[[float], None] = lambda share: None,
) -> SharedRuns:
    """The longest run of each text that is in one of the documents.

    Parameters
    ----------
    texts, documents
        As they look, without line breaks or NUL. Documents are private.
    shortest
        Characters of the shortest run that is looked for, a power of two.
    block
        Characters of each side that are compared at once.
    progress
        Called with the share of the work that is done.
    """
    found = SharedRuns.none(len(texts))
    of_texts, of_documents = list(blocks(texts, block)), list(blocks(documents, block))
    for i, ours in enumerate(of_texts):
        own = Side.of(texts, ours)
        for j, theirs in enumerate(of_documents):
            _compare(own, Side.of(documents, theirs), shortest, found)
            progress((i + (j + 1) / len(of_documents)) / len(of_texts))
    return found


def _compare(ours: Side, theirs: Side, shortest: int, found: SharedRuns) -> None:
    """Note in ``found`` what is longer than before.

    A fingerprint may be that of two runs. This can only make a run too long, and then its characters differ: what is
    found is compared, and if need be all is done again with other multipliers.
    """
    while True:
        runs = _Growth(ours, theirs, shortest, found.lengths[ours.first : ours.first + len(ours.texts)]).runs()
        if _hold(ours, theirs, runs):
            break
    text, length, start, document, place = runs
    at = ours.first + text
    found.lengths[at], found.starts[at] = length, start
    found.documents[at], found.places[at] = theirs.first + document, place


_Runs = tuple[Ints, Ints, Ints, Ints, Ints]
"""Text, length, start in the text, document, place in the document."""


def _hold(ours: Side, theirs: Side, runs: _Runs) -> bool:
    return all(
        ours.texts[text][start : start + length] == theirs.texts[document][place : place + length]
        for text, length, start, document, place in zip(*(column.tolist() for column in runs), strict=True)
    )


class _Growth:
    """Runs of two blocks, from short to long. Places of the documents follow those of the texts."""

    def __init__(self, ours: Side, theirs: Side, shortest: int, known: Ints) -> None:
        self._ours, self._theirs, self._known = ours, theirs, known
        self._border = len(ours.characters)
        self._size = shortest
        self._name: Names = np.full(self._border + len(theirs.characters), NOWHERE, dtype=np.int32)
        self._found: list[_Runs] = []

    def runs(self) -> _Runs:
        """The longest run of every text that has one longer than what is known."""
        at, prints = self._on_both_sides()
        kept, names = _shared(prints, at >= self._border)
        at = at[kept]
        while at.size:
            self._name[at] = names
            other = self._names(at + self._size)
            pairs = at[other >= 0]
            keys = _paired(self._name[pairs], other[other >= 0], int(names.max()) + 1)
            kept, longer = _shared(keys, pairs >= self._border)
            self._finish(at, pairs[kept])
            self._name[at] = NOWHERE
            at, names = pairs[kept], longer
            self._size *= 2
        return tuple(np.concatenate(column) for column in zip(_NONE, *self._found, strict=True))  # type: ignore[return-value]

    def _on_both_sides(self) -> tuple[Ints, NDArray[np.uint64]]:
        """Places whose shortest runs may be on the other side too, and their fingerprints."""
        drawn = multipliers()
        (own, own_prints), (other, other_prints) = (
            side.prints(self._size, drawn) for side in (self._ours, self._theirs)
        )
        # Sixteen times as many cells as runs let few pass that aren't on the other side.
        shift = np.uint64(64 - max(own.size, other.size, 1).bit_length() - 4)
        seen = np.zeros(1 << int(64 - shift), dtype=np.bool_)
        seen[own_prints >> shift] = True
        stays = seen[other_prints >> shift]
        other, other_prints = other[stays], other_prints[stays]
        seen[:] = False
        seen[other_prints >> shift] = True
        stays = seen[own_prints >> shift]
        at = np.concatenate([own[stays], other + self._border])
        return at, np.concatenate([own_prints[stays], other_prints])

    def _names(self, places: Ints) -> Names:
        """Names of the runs at places, `NOWHERE` where there is none or the place lies behind the end."""
        names = np.full(places.shape, NOWHERE, dtype=np.int32)
        inside = places < len(self._name)
        names[inside] = self._name[places[inside]]
        return names

    def _finish(self, at: Ints, longer: Ints) -> None:
        """Find the lengths of texts that share a run of this size, but none of twice the size."""
        own = at[at < self._border]
        text = self._ours.text_of(own)
        ends_here = self._known < 2 * self._size - 1
        ends_here[self._ours.text_of(longer[longer < self._border])] = False
        stays = ends_here[text]
        if stays.any():
            self._extend(own[stays], text[stays], at[at >= self._border])

    def _extend(self, own: Ints, text: Ints, other: Ints) -> None:
        """Note the longest runs of texts whose runs are at least this size and less than twice.

        A place of the documents may be in one class for every length that texts stop at. Where these are too many, half
        of the texts go first: one text takes no more than the places there are.
        """
        runs = self._extended(own, text, other)
        if runs:
            self._found.append(runs)
            return
        first = text <= text[text.size // 2 - 1]
        if first.all():
            first = text < text[-1]
        self._extend(own[first], text[first], other)
        self._extend(own[~first], text[~first], other)

    def _extended(self, own: Ints, text: Ints, other: Ints) -> _Runs | None:
        """What `_extend` notes, or None where it takes more memory than there are characters.

        A class is one run of one length. What a class may grow to is told by the name of the run of this size that ends
        where the longer one does. A text that can grow does, with the classes that let it; a document's place is in
        every class that a text still is in.
        """
        size = self._size
        own_class, other_class = (self._name[places].astype(np.int64) for places in (own, other))
        names = number = int(self._name.max()) + 1
        stays = np.isin(other_class, own_class)
        other, other_class = other[stays], other_class[stays]
        length = np.full(len(self._ours.texts), size, dtype=np.int64)
        other_length = np.full(other.size, size, dtype=np.int64)
        step = size // 2
        while step:
            place = np.concatenate([own + length[text], other + other_length]) + step - size
            ending = self._names(place)
            grows = ending >= 0
            private = np.arange(place.size) >= own.size
            keys = _paired(np.concatenate([own_class, other_class])[grows], ending[grows], names)
            kept, new = _shared(keys, private[grows])
            new_class = np.full(place.size, NOWHERE, dtype=np.int64)
            new_class[np.flatnonzero(grows)[kept]] = number + new
            own_new, other_new = new_class[: own.size], new_class[own.size :]
            grown = np.zeros(len(length), dtype=np.bool_)
            grown[text[own_new >= 0]] = True
            stays = ~grown[text] | (own_new >= 0)
            own_class = np.where(grown[text], own_new, own_class)[stays]
            own, text = own[stays], text[stays]
            length[grown] += step
            # A place that grows may also stay behind, for texts that couldn't grow.
            behind = np.isin(other_class, own_class)
            grows_on = np.isin(other_new, own_class) & (other_new >= 0)
            if behind.sum() + grows_on.sum() > len(self._name) and text[0] != text[-1]:
                return None
            other, other_class, other_length = (
                np.concatenate([a[behind], b[grows_on]])
                for a, b in ((other, other), (other_class, other_new), (other_length, other_length + step))
            )
            number += int(new.max(initial=-1)) + 1
            step //= 2
        return self._placed(own, text, own_class, length, other, other_class)

    def _placed(self, own: Ints, text: Ints, own_class: Ints, length: Ints, other: Ints, other_class: Ints) -> _Runs:
        """The first of every text's runs, and the first place of the documents that has it; known ones left out."""
        texts, first = np.unique(text, return_index=True)
        longer = length[texts] > self._known[texts]
        texts, first = texts[longer], first[longer]
        classes, place = np.unique(other_class, return_index=True)
        at = other[place[np.searchsorted(classes, own_class[first])]] - self._border
        document = self._theirs.text_of(at)
        starts = own[first] - self._ours.offsets[texts]
        return texts, length[texts], starts, document, at - self._theirs.offsets[document]


_NONE: _Runs = tuple(np.zeros(0, dtype=np.int64) for _ in range(5))  # type: ignore[assignment]


def _paired(first: NDArray[np.integer], second: NDArray[np.integer], names: int) -> Ints:
    """One number for every pair; ``second`` is less than ``names``."""
    return first.astype(np.int64) * names + second


def _shared(keys: NDArray[np.integer], private: NDArray[np.bool_]) -> tuple[Ints, Names]:
    """(indices, names): the keys that occur with and without ``private``, and a name for each distinct one, from 0."""
    if not keys.size:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
    order = np.argsort(keys)
    ordered = keys[order]
    is_first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    starts = np.flatnonzero(is_first)
    of_documents = private[order]
    both = np.logical_or.reduceat(of_documents, starts) & np.logical_or.reduceat(~of_documents, starts)
    names = np.where(both, np.cumsum(both) - 1, NOWHERE).astype(np.int32)[np.cumsum(is_first) - 1]
    back = np.empty_like(names)
    back[order] = names
    kept = np.flatnonzero(back >= 0)
    return kept, back[kept]
