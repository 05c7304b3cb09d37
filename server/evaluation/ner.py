"""Named entities: what a tagger that was trained on synthetic text finds in real text.

Synthetic text has no entity labels. A first tagger, trained on public labelled text, labels it; a second one, trained
on that alone, is tested on real labelled text. It can't be better than the first one, whose own result is the ceiling.

A tagger is a linear classifier of each token by the words around it: good enough to tell corpora apart, in seconds and
without torch. An entity counts as found with the right type, beginning and end (IOB2, as CoNLL and seqeval count).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import DataError
from common.site.formats import Problem, as_text, rows_of
from server.evaluation.intervals import RESAMPLES, Estimate, Floats, of_resamples
from server.evaluation.utility import check_scikit_learn

TOKENS, TAGS = "tokens", "tags"
"""Columns, of lists."""

OUTSIDE = "O"

_WORD = re.compile(r"\w+|[^\w\s]")
_FEATURES = 1 << 18
_EPOCHS = 8
_TAG = re.compile(r"O|[BI]-.+")

Span = tuple[str, int, int]
"""Type, first token, token after the last."""


@dataclass(frozen=True, repr=False)
class Tagged:
    """Sentences as tokens, with a tag (IOB2) for each token."""

    tokens: tuple[tuple[str, ...], ...]
    tags: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.tokens)


def read_tagged(path: Path, name: str, part: tuple[str, Collection[str]] | None = None) -> Tagged:
    """Sentences of a file with lists in columns 'tokens' and 'tags'.

    Parameters
    ----------
    part
        A column and its values: only rows that have one of these. Unset means all rows.

    Raises
    ------
    DataError
        If the file can't be read, no row can be used, a tag isn't IOB2, or there is no entity.
    """
    fixes = dict.fromkeys((TOKENS, TAGS), "labelled sentences need a list of words in 'tokens', of IOB2 tags in 'tags'")
    column, values = part or ("", ())
    if part is not None:
        fixes[column] = "it says which sentences are for testing"
    tokens, tags = [], []
    for row in rows_of(path, fixes, lists=(TOKENS, TAGS)):
        if isinstance(row, Problem) or not all(isinstance(cell, list) for cell in row[:2]):
            continue
        if len(row[0]) != len(row[1]) or (part is not None and as_text(row[2]) not in values):
            continue
        tokens.append(tuple(map(as_text, row[0])))
        tags.append(tuple(map(as_text, row[1])))
    odd = next((tag for own in tags for tag in own if not _TAG.fullmatch(tag)), None)
    if odd is not None:
        raise DataError(f"{name}: tag {odd!r} isn't IOB2; 'O', 'B-TYPE' and 'I-TYPE' are accepted")
    if not any(tag != OUTSIDE for own in tags for tag in own):
        where = "" if part is None else f" whose {column!r} is one of {sorted(values)}"
        raise DataError(
            f"{name}: no row{where} with equally many tokens and tags has an entity; at least one is needed"
        )
    return Tagged(tuple(tokens), tuple(tags))


def tokens_of(text: str) -> tuple[str, ...]:
    """Words and marks of a text."""
    return tuple(_WORD.findall(text))


class Tagger:
    """Tells each token's tag.

    Parameters
    ----------
    examples
        To learn from.
    seed
        Of the order; no privacy hangs on it.
    """

    def __init__(self, examples: Tagged, seed: int = 0) -> None:
        check_scikit_learn()
        from sklearn.linear_model import SGDClassifier

        tags = [tag for own in examples.tags for tag in own]
        self._only = tags[0] if len(set(tags)) == 1 else None
        self._model: Any = SGDClassifier(
            loss="log_loss", alpha=1e-6, max_iter=_EPOCHS, tol=None, average=True, random_state=seed
        )
        if self._only is None:
            self._model.fit(_features(examples.tokens), np.array(tags))

    def __call__(self, sentences: Sequence[Sequence[str]]) -> Tagged:
        """The sentences with their tags; an I that follows nothing of its type becomes a B."""
        tokens = tuple(tuple(own) for own in sentences)
        if not any(tokens):
            return Tagged(tokens, tuple(() for _ in tokens))
        number = sum(map(len, tokens))
        said = [self._only] * number if self._only is not None else self._model.predict(_features(tokens))
        flat = iter(map(str, said))
        return Tagged(tokens, tuple(_repaired([next(flat) for _ in own]) for own in tokens))


def relabelled(teacher: Tagger, texts: Sequence[str]) -> Tagged:
    """Texts as a tagger labels them, without those that have no word."""
    return teacher([tokens for tokens in map(tokens_of, texts) if tokens])


def macro_f1(true: Sequence[Sequence[str]], said: Sequence[Sequence[str]], seed: int = 0) -> Estimate:
    """Mean of the F1 of the entity types that are there, with an interval from resampled sentences."""
    counts = _counts(true, said)
    picks = np.random.default_rng(seed).integers(len(counts), size=(RESAMPLES, len(counts)))
    times = np.stack([np.bincount(pick, minlength=len(counts)) for pick in picks])
    resampled = np.einsum("rs,stk->rtk", times, counts, optimize=True)
    return of_resamples(float(_f1(counts.sum(axis=0)[None])[0]), _f1(resampled))


def spans(tags: Sequence[str]) -> set[Span]:
    """The entities of a sentence in IOB2."""
    return set(_spans(tags))


def _spans(tags: Sequence[str]) -> Iterator[Span]:
    start = 0
    for place, tag in enumerate([*tags, OUTSIDE]):
        before = tags[place - 1] if place else OUTSIDE
        goes_on = tag.startswith("I-") and before[2:] == tag[2:] and before != OUTSIDE
        if goes_on:
            continue
        if before != OUTSIDE:
            yield before[2:], start, place
        start = place


def _counts(true: Sequence[Sequence[str]], said: Sequence[Sequence[str]]) -> NDArray[np.int64]:
    """Right, said and true entities, ``(sentences, types of the true ones, 3)``."""
    pairs = [(spans(a), spans(b)) for a, b in zip(true, said, strict=True)]
    types = {name: place for place, name in enumerate(sorted({span[0] for there, _ in pairs for span in there}))}
    counts = np.zeros((len(pairs), len(types), 3), dtype=np.int64)
    for row, (there, found) in zip(counts, pairs, strict=True):
        for kind, group in enumerate((there & found, found, there)):
            for span in group:
                if span[0] in types:
                    row[types[span[0]], kind] += 1
    return counts


def _f1(counts: NDArray[np.int64]) -> Floats:
    """Of each table ``(tables, types, 3)``; a type with no entity on either side has none."""
    right, both = counts[..., 0], counts[..., 1] + counts[..., 2]
    each = np.where(both > 0, 2 * right / np.maximum(both, 1), np.nan)
    return np.asarray(np.nanmean(each, axis=1), dtype=np.float64)


def _repaired(tags: Sequence[str]) -> tuple[str, ...]:
    found: list[str] = []
    for tag in tags:
        before = found[-1] if found else OUTSIDE
        loose = tag.startswith("I-") and before[1:] != tag[1:]
        found.append(f"B{tag[1:]}" if loose else tag)
    return tuple(found)


def _features(sentences: Sequence[Sequence[str]]) -> Any:
    from sklearn.feature_extraction import FeatureHasher

    hasher = FeatureHasher(n_features=_FEATURES, input_type="string", alternate_sign=False, dtype=np.float32)
    return hasher.transform(names for own in sentences for names in _of_sentence(own))


def _of_sentence(tokens: Sequence[str]) -> Iterator[list[str]]:
    folded = ["<", "<", *(token.casefold() for token in tokens), ">", ">"]
    shapes = ["", "", *map(_shape, tokens), "", ""]
    for place in range(2, len(folded) - 2):
        word = folded[place]
        yield [
            *(f"{offset} {folded[place + offset]}" for offset in range(-2, 3)),
            *(f"shape {offset} {shapes[place + offset]}" for offset in range(-1, 2)),
            f"before {folded[place - 1]} {word}",
            f"after {word} {folded[place + 1]}",
            *(f"end {word[-size:]}" for size in range(2, 6)),
            *(f"start {word[:size]}" for size in range(2, 5)),
        ]


def _shape(token: str) -> str:
    """Capitals, small letters, digits, others; of a run of one kind, one."""
    kinds = ("A" if c.isupper() else "a" if c.islower() else "0" if c.isdigit() else c for c in token)
    return re.sub(r"(.)\1+", r"\1", "".join(kinds))
