"""A corpus that doesn't depend on the training texts shows nothing; its twin that copies them shows on every test."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from common.errors import DataError
from server.evaluation.distances import nearest_two
from server.evaluation.leakage import (
    auc,
    canary_scores,
    exposure,
    membership,
    nearer_share,
    ratios,
    shared_characters,
    true_positives,
)

COPIED, INDEPENDENT = True, False


def _sides(copied: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(corpus, training, held-out) as vectors of length 1; a copied corpus is the training texts, almost."""
    chance = np.random.default_rng(0)
    training, holdout, corpus = (chance.normal(size=(400, 16)) for _ in range(3))
    if copied:
        corpus = training + chance.normal(0, 0.01, training.shape)
    corpus, training, holdout = (
        (v / np.linalg.norm(v, axis=1, keepdims=True)).astype(np.float32) for v in (corpus, training, holdout)
    )
    return corpus, training, holdout


@pytest.mark.parametrize("copied", [INDEPENDENT, COPIED])
def test_nearest_documents(copied: bool) -> None:
    corpus, training, holdout = _sides(copied)
    inside, outside = nearest_two(corpus, training), nearest_two(corpus, holdout)
    for found in (nearer_share(inside[:, 0], outside[:, 0]), nearer_share(ratios(inside), ratios(outside))):
        assert found.low is not None
        assert found.high is not None
        if copied:
            assert found.low > 0.95
        else:
            assert found.low < 0.5 < found.high


@pytest.mark.parametrize("copied", [INDEPENDENT, COPIED])
def test_membership_inference(copied: bool) -> None:
    corpus, training, holdout = _sides(copied)
    scores = [-nearest_two(side, corpus)[:, 0] for side in (training, holdout)]
    found = membership(*scores)
    assert found.tpr is not None
    assert found.auc.low is not None
    assert found.auc.high is not None
    if copied:
        assert found.auc.low > 0.99
        assert found.tpr.value > 0.99
    else:
        assert found.auc.low < 0.5 < found.auc.high
        assert found.tpr.value < 0.05


def test_auc_and_true_positives_are_those_of_scikit_learn_and_of_counting() -> None:
    chance = np.random.default_rng(1)
    members, others = chance.integers(0, 20, 300).astype(float) + 2, chance.integers(0, 20, 200).astype(float)
    truth = [1] * 300 + [0] * 200
    assert auc(members, others) == pytest.approx(roc_auc_score(truth, np.concatenate([members, others])))
    others = np.arange(200.0)
    # Two of two hundred may be false alarms: 199 and 198.
    assert true_positives(np.array([197.0, 197.5, 198.5, 300.0]), others) == 0.75


def test_one_in_a_hundred_needs_a_hundred() -> None:
    assert membership(np.ones(50), np.zeros(99)).tpr is None
    assert membership(np.ones(50), np.zeros(100)).tpr is not None
    with pytest.raises(DataError, match="0 members"):
        membership(np.zeros(0), np.ones(5))


def test_ties_count_half() -> None:
    assert nearer_share(np.zeros(10), np.zeros(10)).value == 0.5
    assert membership(np.zeros(10), np.zeros(10)).auc.value == 0.5
    assert ratios(np.array([[0.0, 0.0], [0.0, 1.0], [0.5, 1.0]])).tolist() == [1, 0, 0.5]


def test_exposure_is_log2_of_the_rank() -> None:
    references = np.arange(1023.0)
    assert exposure(5000.0, references) == 10
    assert exposure(-1.0, references) == 0
    # 511 references are better, one is tied half the time.
    assert exposure(511.0, references) == pytest.approx(np.log2(1024 / 512.5))
    with pytest.raises(DataError, match="no references"):
        exposure(1.0, np.zeros(0))


def test_exposure_of_chance_is_one_and_a_half_bits() -> None:
    chance = np.random.default_rng(0)
    found = [exposure(chance.random(), chance.random(500)) for _ in range(4000)]
    assert np.mean(found) == pytest.approx(1 / np.log(2), abs=0.1)


@pytest.mark.parametrize("copied", [INDEPENDENT, COPIED])
def test_a_canary_in_the_corpus_stands_out(copied: bool) -> None:
    secret = "the code of the safe of ward seven is 4711-0815, ask matron"
    corpus = ["a kind nurse", f"Thanks. {secret.title()}!" if copied else "thanks to all"]
    references = [f"the code of the safe of ward {i} is {1000 + 7 * i}-{i:04}, ask porter" for i in range(63)]
    score, *others = canary_scores([secret, *references], corpus)
    assert exposure(score, np.array(others)) == (6 if copied else pytest.approx(1, abs=0.05))


def test_shared_characters_do_not_see_case() -> None:
    lengths = shared_characters(["xx THE SAME TWENTY CHARS yy", "nothing"], ["aa the same twenty chars bb"])
    assert lengths.tolist() == [len(" the same twenty chars "), 0]
