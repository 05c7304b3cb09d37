"""Train on synthetic, test on real: what a classifier that has seen only the corpus gets right on real documents.

    found = score(test_labels, tfidf_predictions(corpus_texts, corpus_labels, test_texts))
    found.accuracy.value, found.macro_f1.low

Labels that the training texts don't have are wrong answers. Macro-F1 is over the labels that the test texts have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import MissingExtraError
from server.evaluation.intervals import RESAMPLES, Estimate, Floats, of_resamples

MOST_FEATURES = 200_000
"""Words and pairs of words."""

_STRENGTH = 10.0
"""Inverse of the regularisation (scikit-learn's C), for rows of length 1."""

_WORDS_OR_MARKS = r"\w+|[^\w\s]"
_ITERATIONS = 300


@dataclass(frozen=True)
class Score:
    """How well labels were told."""

    accuracy: Estimate
    macro_f1: Estimate


def score(true: Sequence[str], predicted: Sequence[str], seed: int = 0) -> Score:
    """Accuracy and macro-F1, with intervals from a bootstrap over the test texts."""
    counts = confusion(true, predicted)
    total = int(counts.sum())
    # Resampled texts are a multinomial draw of the table's cells: the same, thousands of times faster.
    drawn = np.random.default_rng(seed).multinomial(total, counts.ravel() / total, size=RESAMPLES)
    tables = drawn.reshape(-1, *counts.shape)
    return Score(
        of_resamples(float(accuracy(counts[None])[0]), accuracy(tables)),
        of_resamples(float(macro_f1(counts[None])[0]), macro_f1(tables)),
    )


def confusion(true: Sequence[str], predicted: Sequence[str]) -> NDArray[np.int64]:
    """Texts by true and predicted label, int64 ``(labels, labels + 1)``; last column: a label no test text has."""
    places = {label: place for place, label in enumerate(sorted(set(true)))}
    counts = np.zeros((len(places), len(places) + 1), dtype=np.int64)
    for a, b in zip(true, predicted, strict=True):
        counts[places[a], places.get(b, len(places))] += 1
    return counts


def accuracy(tables: NDArray[np.int64]) -> Floats:
    """Share of right answers of each table ``(tables, labels, labels + 1)``."""
    return np.asarray(_right(tables).sum(axis=1) / tables.sum(axis=(1, 2)), dtype=np.float64)


def macro_f1(tables: NDArray[np.int64]) -> Floats:
    """Mean F1 of the labels of each table; a label with neither texts nor answers has none."""
    right = _right(tables)
    all_ = tables.sum(axis=2) + tables[:, :, :-1].sum(axis=1)
    f1 = np.where(all_ > 0, 2 * right / np.maximum(all_, 1), np.nan)
    return np.asarray(np.nanmean(f1, axis=1), dtype=np.float64)


def majority_predictions(train_labels: Sequence[str], tests: int) -> list[str]:
    """The most frequent label for every test text; of equals the first by name."""
    counts = Counter(train_labels)
    return [min(counts, key=lambda label: (-counts[label], label))] * tests


def tfidf_predictions(texts: Sequence[str], labels: Sequence[str], tests: Sequence[str]) -> list[str]:
    """Logistic regression on TF-IDF of words and pairs of words.

    Raises
    ------
    MissingExtraError
        If scikit-learn isn't installed.
    """
    check_scikit_learn()
    from sklearn.feature_extraction.text import TfidfVectorizer

    if not _can_learn(labels):
        return [labels[0]] * len(tests)
    vectorizer = TfidfVectorizer(
        # A token of any kind: the default pattern finds nothing in a text of single letters, and fails.
        ngram_range=(1, 2), sublinear_tf=True, max_features=MOST_FEATURES, token_pattern=_WORDS_OR_MARKS,
        dtype=np.float32,
    )  # fmt: skip
    features = vectorizer.fit_transform(texts)
    return _fitted(features, labels, vectorizer.transform(tests))


def vector_predictions(vectors: NDArray[np.float32], labels: Sequence[str], tests: NDArray[np.float32]) -> list[str]:
    """Logistic regression on vectors of length 1, ``(texts, dimension)``. Raises as `tfidf_predictions` does."""
    check_scikit_learn()
    return _fitted(vectors, labels, tests) if _can_learn(labels) else [labels[0]] * len(tests)


def check_scikit_learn() -> None:
    """Raise MissingExtraError if scikit-learn isn't installed."""
    try:
        import sklearn  # noqa: F401
    except ImportError as cause:
        raise MissingExtraError("scikit-learn isn't installed; pip install 'fedcorpus[evaluation]'") from cause


def _fitted(features: Any, labels: Sequence[str], tests: Any) -> list[str]:
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=_STRENGTH, max_iter=_ITERATIONS, tol=1e-3)
    return [str(label) for label in model.fit(features, np.array(labels)).predict(tests)]


def _can_learn(labels: Sequence[str]) -> bool:
    return len(set(labels)) > 1


def _right(tables: NDArray[np.int64]) -> NDArray[np.int64]:
    labels = np.arange(tables.shape[1])
    return np.asarray(tables[:, labels, labels])
