"""Classifiers' scores are those of scikit-learn, and the classifiers learn what is there and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, f1_score

from server.evaluation.utility import majority_predictions, score, tfidf_predictions, vector_predictions

STAFF = ["the nurse was kind", "kind staff all day", "the nurse smiled", "staff helped me"]
PARKING = ["no parking space", "parking costs too much", "the car park was full", "cars everywhere"]
TEXTS, LABELS = [*STAFF, *PARKING], ["staff"] * 4 + ["parking"] * 4
TESTS, TRUE = ["a kind nurse", "the car park costs"], ["staff", "parking"]


def _answers(seed: int, size: int = 400) -> tuple[list[str], list[str]]:
    chance = np.random.default_rng(seed)
    true = chance.choice(list("abc"), size, p=[0.7, 0.2, 0.1])
    said = np.where(chance.random(size) < 0.6, true, chance.choice(list("abcd"), size))
    return true.tolist(), said.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_scores_are_those_of_scikit_learn(seed: int) -> None:
    true, said = _answers(seed)
    found = score(true, said)
    assert found.accuracy.value == pytest.approx(accuracy_score(true, said))
    assert found.macro_f1.value == pytest.approx(f1_score(true, said, average="macro", labels=sorted(set(true))))


def test_an_interval_is_as_wide_as_theory_says() -> None:
    true, said = _answers(0)
    found = score(true, said).accuracy
    assert found.low is not None
    assert found.high is not None
    expected = 2 * 1.96 * np.sqrt(found.value * (1 - found.value) / len(true))
    assert found.high - found.low == pytest.approx(expected, rel=0.15)


def test_an_interval_holds_what_other_samples_have() -> None:
    whole = score(*_answers(99, 200_000)).macro_f1.value
    within = 0
    for seed in range(40):
        found = score(*_answers(seed)).macro_f1
        assert found.low is not None
        assert found.high is not None
        within += found.low <= whole <= found.high
    assert within >= 34


def test_classifiers_learn_what_words_and_vectors_mean() -> None:
    assert tfidf_predictions(TEXTS, LABELS, TESTS) == TRUE
    vectors = np.eye(2, dtype=np.float32)[[0] * 4 + [1] * 4]
    assert vector_predictions(vectors, LABELS, vectors[[0, 7]]) == TRUE


def test_shuffled_labels_teach_nothing() -> None:
    chance = np.random.default_rng(0)
    texts = [f"{'staff' if i % 2 else 'parking'} word{i % 17}" for i in range(300)]
    labels = ["staff" if i % 2 else "parking" for i in range(300)]
    shuffled = chance.permutation(labels).tolist()
    right = score(labels, tfidf_predictions(texts, labels, texts)).accuracy.value
    wrong = score(labels, tfidf_predictions(texts[:150], shuffled[:150], texts)).accuracy.value
    assert right == 1
    assert wrong < 0.7


def test_a_corpus_of_one_label_says_always_that() -> None:
    assert tfidf_predictions(STAFF, ["staff"] * 4, TESTS) == ["staff", "staff"]
    vectors = np.eye(4, dtype=np.float32)
    assert vector_predictions(vectors, ["staff"] * 4, vectors[:2]) == ["staff", "staff"]


def test_texts_of_marks_only_are_texts_too() -> None:
    assert tfidf_predictions(["!!!", "???"], ["a", "b"], ["!"]) == ["a"]


def test_the_majority_is_the_largest_label() -> None:
    assert majority_predictions(["b", "a", "b"], 2) == ["b", "b"]
    assert majority_predictions(["b", "a"], 1) == ["a"]
