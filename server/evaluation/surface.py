"""What can be told of texts without a model: their labels, lengths, words and repetitions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from server.evaluation.intervals import Estimate, Floats, jackknife
from server.evaluation.texts import Texts, key, keys
from server.seen import NearTexts

NEAR_DUPLICATE = 0.8
"""Jaccard overlap of runs of 5 characters, as `server.seen.NearTexts` finds it."""

_RESAMPLES = 500
_WORD = re.compile(r"\w+|[^\w\s]")


def variation(first: Sequence[Hashable], second: Sequence[Hashable]) -> float:
    """Total variation distance of the shares of codes, 0 to 1."""
    p, q = _shares(first, second)
    return float(abs(p - q).sum() / 2)


def variation_estimate(first: Sequence[Hashable], second: Sequence[Hashable], seed: int = 0) -> Estimate:
    """The same with an interval from resampled texts."""
    p, q = _shares(first, second)
    chance = np.random.default_rng(seed)
    a = chance.multinomial(len(first), p, size=_RESAMPLES) / len(first)
    b = chance.multinomial(len(second), q, size=_RESAMPLES) / len(second)
    return Estimate.spread(variation(first, second), float((abs(a - b).sum(axis=1) / 2).std()), least=0.0, most=1.0)


def variation_from_even(codes: Sequence[Hashable]) -> float:
    """Total variation distance to equal shares of the codes that are there: what a draw without a profile gives."""
    shares = np.array(list(Counter(codes).values())) / len(codes)
    return float(abs(shares - 1 / len(shares)).sum() / 2)


def words(text: str) -> list[str]:
    """Words and marks, without case."""
    return _WORD.findall(text.casefold())


def lengths(texts: Sequence[str]) -> NDArray[np.int64]:
    """Words and marks of each text, int64 ``(texts,)``."""
    return np.array([len(words(text)) for text in texts], dtype=np.int64)


def length_distance(first: NDArray[np.int64], second: NDArray[np.int64]) -> float:
    """Wasserstein distance of two sets of lengths: words by which lengths differ after the best matching."""
    from scipy.stats import wasserstein_distance

    return float(wasserstein_distance(first, second))


def length_distance_estimate(first: NDArray[np.int64], second: NDArray[np.int64]) -> Estimate:
    """The same with an interval, by jackknife; lengths in random order."""
    deviation = jackknife(lambda a, b: length_distance(first[a], second[b]), (len(first), len(second)))
    return Estimate.spread(length_distance(first, second), deviation, least=0.0)


def distinct(texts: Sequence[str], size: int, most: int) -> float:
    """Share of distinct ones among the first ``most`` runs of ``size`` words (Li et al. 2016); 0 if there are none.

    It falls with the number of runs: compare only for the same ``most``.
    """
    runs = _runs(texts, size)[:most]
    return len(set(runs)) / len(runs) if runs else 0.0


def run_count(texts: Sequence[str], size: int) -> int:
    """Runs of ``size`` words within texts."""
    return sum(max(0, len(words(text)) - size + 1) for text in texts)


def duplicates(texts: Texts) -> float:
    """Share of texts that an earlier one is equal to, apart from case and blanks."""
    return 1 - len(set(keys(texts))) / len(texts)


def near_duplicates(texts: Texts) -> float:
    """Share of texts that are nearly like an earlier one of their code, equal ones included."""
    near = NearTexts(NEAR_DUPLICATE, len(texts))
    number = {code: place for place, code in enumerate(dict.fromkeys(texts.codes))}
    found = [near.add(text.casefold(), number[code]) for text, code in zip(texts.texts, texts.codes, strict=True)]
    return sum(found) / len(texts)


def shared_share(texts: Texts, others: Texts) -> float:
    """Share of texts that are equal to one of ``others``, apart from case and blanks."""
    known = set(keys(others))
    return sum(key(text) in known for text in texts.texts) / len(texts)


def shuffled_words(texts: Sequence[str], seed: int = 0) -> list[str]:
    """Texts of the same lengths whose words are those of all texts, in random order: the right words and no more."""
    chance = np.random.default_rng(seed)
    pieces = [text.split() for text in texts]
    everything = [word for own in pieces for word in own]
    order = iter(chance.permutation(len(everything)).tolist())
    return [" ".join(everything[next(order)] for _ in own) for own in pieces]


def _shares(first: Sequence[Hashable], second: Sequence[Hashable]) -> tuple[Floats, Floats]:
    a, b = Counter(first), Counter(second)
    codes = list(dict.fromkeys([*a, *b]))
    p, q = (np.array([counts[code] for code in codes]) / counts.total() for counts in (a, b))
    return p, q


def _runs(texts: Sequence[str], size: int) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for text in texts:
        own = words(text)
        found += [tuple(own[i : i + size]) for i in range(len(own) - size + 1)]
    return found
