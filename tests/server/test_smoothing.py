"""Kernel smoothing of noisy votes: it removes noise, keeps what is there, and nothing breaks it."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import PrivacyError, ProtocolError, StudyError
from server import smoothing
from server.aggregate import SELECTION_RULES, Selection, select, simplex_weights
from server.smoothing import smoothed

SIGMA = 12.0


def _scene(candidates: int = 300, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """True votes that are a smooth function of the embedding, noisy ones, and the embeddings."""
    random = np.random.default_rng(seed)
    embeddings = random.normal(size=(candidates, 3)).astype(np.float32)
    true = 30 * np.exp(-((embeddings - 0.5) ** 2).sum(axis=1))
    noisy = np.rint(true + random.normal(0, SIGMA, candidates)).astype(np.int64)
    return true, noisy, embeddings


def _error(found: np.ndarray, true: np.ndarray) -> float:
    return float(((found - true) ** 2).mean())


def test_smoothed_votes_are_nearer_to_the_truth() -> None:
    for seed in range(5):
        true, noisy, embeddings = _scene(seed=seed)
        assert _error(smoothed(noisy, embeddings, SIGMA**2), true) < 0.5 * _error(noisy, true)


def test_votes_that_are_told_to_be_exact_stay_as_they_are() -> None:
    """Twin: without the noise's variance nothing is gained."""
    _, noisy, embeddings = _scene()
    np.testing.assert_array_equal(smoothed(noisy, embeddings, 0), noisy)


def test_embeddings_that_say_nothing_do_no_harm() -> None:
    true, noisy, embeddings = _scene()
    shuffled = np.random.default_rng(1).permutation(embeddings)
    assert _error(smoothed(noisy, shuffled, SIGMA**2), true) < _error(noisy, true)


def test_noise_alone_comes_out_nearly_flat() -> None:
    random = np.random.default_rng(2)
    noise = np.rint(random.normal(0, SIGMA, 400)).astype(np.int64)
    found = smoothed(noise, random.normal(size=(400, 3)).astype(np.float32), SIGMA**2)
    assert found.std() < 0.4 * SIGMA


def test_votes_far_above_the_noise_are_kept() -> None:
    random = np.random.default_rng(3)
    votes = random.integers(0, 100_000, 200)
    found = smoothed(votes, random.normal(size=(200, 8)).astype(np.float32), 1.0)
    assert np.abs(found - votes).max() < 10


@pytest.mark.parametrize("low_rank", [False, True])
def test_the_order_of_candidates_does_not_matter(low_rank: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if low_rank:
        monkeypatch.setattr(smoothing, "EXACT", 50)
        monkeypatch.setattr(smoothing, "LANDMARKS", 40)
    _, noisy, embeddings = _scene()
    order = np.random.default_rng(4).permutation(noisy.size)
    found = smoothed(noisy, embeddings, SIGMA**2)
    np.testing.assert_allclose(smoothed(noisy[order], embeddings[order], SIGMA**2), found[order], atol=1e-5)


def test_low_rank_and_blocks_come_close_to_the_whole_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    true, noisy, embeddings = _scene(600)
    whole = smoothed(noisy, embeddings, SIGMA**2)
    monkeypatch.setattr(smoothing, "EXACT", 100)
    monkeypatch.setattr(smoothing, "LANDMARKS", 200)
    monkeypatch.setattr(smoothing, "BLOCK", 64)
    low_rank = smoothed(noisy, embeddings, SIGMA**2)
    assert _error(low_rank, whole) < 0.1 * _error(whole, noisy)
    assert _error(low_rank, true) < 0.5 * _error(noisy, true)


@pytest.mark.parametrize("votes", [[], [7], [3, 3, 3, 3]], ids=["none", "one", "equal"])
def test_votes_without_any_difference_stay(votes: list[int]) -> None:
    embeddings = np.random.default_rng(5).normal(size=(len(votes), 4)).astype(np.float32)
    np.testing.assert_array_equal(smoothed(np.array(votes, dtype=np.int64), embeddings, 4.0), votes)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-5, 5), min_size=2, max_size=12),
    st.integers(1, 3),
    st.floats(0, 1e300),
)
def test_no_ballot_however_absurd_gives_anything_but_numbers(votes: list[int], points: int, variance: float) -> None:
    """Embeddings repeat: the kernel is singular."""
    embeddings = np.eye(3, dtype=np.float32)[np.arange(len(votes)) % points]
    assert np.isfinite(smoothed(np.array(votes, dtype=np.int64), embeddings, variance)).all()


@pytest.mark.parametrize("shape", [(3, 2), (4, 0), (4,)])
def test_one_vector_per_vote_is_needed(shape: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError, match="one vector of at least one dimension per vote"):
        smoothed(np.zeros(4, np.int64), np.zeros(shape, np.float32), 1.0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_embedding_that_is_no_number_is_named(value: float) -> None:
    embeddings = np.zeros((4, 2), np.float32)
    embeddings[2, 1] = value
    with pytest.raises(ProtocolError, match="1 embeddings, the first of candidate 2"):
        smoothed(np.zeros(4, np.int64), embeddings, 1.0)


@pytest.mark.parametrize("variance", [-1.0, np.nan, np.inf])
def test_a_variance_that_is_none_is_refused(variance: float) -> None:
    with pytest.raises(PrivacyError, match="noise_variance"):
        smoothed(np.array([1, 2]), np.eye(2, dtype=np.float32), variance)


def test_memory_is_bounded_however_many_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of all pairs would take 800 MB; the low rank takes what its landmarks and one block do."""
    monkeypatch.setattr(smoothing, "LANDMARKS", 100)
    monkeypatch.setattr(smoothing, "BLOCK", 1000)
    _, noisy, embeddings = _scene(10_000)
    tracemalloc.start()
    try:
        smoothed(noisy, embeddings, SIGMA**2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20e6


def test_candidates_that_are_all_alike_are_all_taken_for_their_mean_or_their_own_votes() -> None:
    votes = np.random.default_rng(6).integers(0, 100, 50)
    found = smoothed(votes, np.ones((50, 4), np.float32), 100.0)
    assert np.isfinite(found).all()
    assert found.mean() == pytest.approx(votes.mean())
    assert np.ptp(found) <= np.ptp(votes)


def test_equal_votes_of_neighbours_that_are_one_point_are_equal_after_it() -> None:
    _, noisy, embeddings = _scene(60)
    twice, votes = np.repeat(embeddings, 2, axis=0), np.repeat(noisy, 2)
    found = smoothed(votes, twice, SIGMA**2)
    np.testing.assert_allclose(found[::2], found[1::2], atol=1e-6)


def _selected(votes: np.ndarray, rule: str = "simplex", quota: int = 30, **smoothing: Any) -> Selection:
    return select(
        rule, votes=votes, codes_of_candidates=np.zeros(votes.size, np.int32), quotas=np.array([quota]),
        expected=np.array([1000.0]), generator=np.random.default_rng(0), **smoothing,
    )  # fmt: skip


def test_selection_by_smoothed_votes_finds_better_candidates() -> None:
    gained = 0.0
    for seed in range(5):
        true, noisy, embeddings = _scene(seed=seed)
        plain = _selected(noisy)
        kernel = _selected(noisy, smoothing="kernel", embeddings=embeddings, noise_variance=SIGMA**2)
        told_wrong = _selected(noisy, smoothing="kernel", embeddings=embeddings, noise_variance=0)
        assert told_wrong.chosen.tolist() == plain.chosen.tolist(), "twin: without the noise's variance"
        gained += true[kernel.chosen].mean() / true[plain.chosen].mean()
    assert gained / 5 > 1.1


@pytest.mark.parametrize("rule", sorted(SELECTION_RULES))
@pytest.mark.parametrize(
    "votes", [[], [4], [5, 5, 5], [2**63 - 1, 0, -(2**63), 3]], ids=["none", "one", "equal", "huge"]
)
def test_every_rule_fills_its_quota_from_smoothed_votes(rule: str, votes: list[int]) -> None:
    embeddings = np.eye(4, dtype=np.float32)[: len(votes)]
    found = _selected(
        np.array(votes, np.int64), rule, smoothing="kernel", embeddings=embeddings, noise_variance=9.0
    )  # fmt: skip
    assert found.chosen.size + found.shortfall[0] == 30
    assert found.chosen.dtype == np.int64
    assert bool(found.chosen.size) == bool(votes)


def test_each_code_is_smoothed_on_its_own() -> None:
    """Candidates of two codes lie on the same points: votes of the one say nothing about the other."""
    _, noisy, embeddings = _scene(200)
    both = np.r_[noisy, np.zeros(200, np.int64)]
    found = select(
        "simplex", votes=both, codes_of_candidates=np.repeat(np.arange(2, dtype=np.int32), 200),
        quotas=np.array([20, 20]), expected=np.array([1000.0, 10.0]), generator=np.random.default_rng(0),
        smoothing="kernel", embeddings=np.vstack([embeddings, embeddings]), noise_variance=SIGMA**2,
    )  # fmt: skip
    alone = smoothed(noisy, embeddings, SIGMA**2)
    best = np.argsort(-alone)[:20]
    assert sorted(found.chosen[found.chosen < 200].tolist()) == sorted(best.tolist())


def test_smoothing_that_cannot_be_done_is_refused() -> None:
    votes = np.arange(3)
    for embeddings in (None, np.eye(2, dtype=np.float32)):
        with pytest.raises(ProtocolError, match="3 candidates, embeddings"):
            _selected(votes, smoothing="kernel", embeddings=embeddings, noise_variance=1.0)
    with pytest.raises(StudyError, match="smoothing is 'splines'"):
        _selected(votes, smoothing="splines")


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=20), st.floats(-10, 1e12))
def test_weights_of_votes_that_are_not_whole_sum_to_one(votes: list[float], total: float) -> None:
    weights = simplex_weights(np.array(votes), total)
    assert weights.sum() == pytest.approx(1)
    assert weights.min() >= 0
    assert weights[np.argmax(votes)] == weights.max()


@given(st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=20), st.integers(1, 1000))
def test_whole_votes_weigh_the_same_as_floats(votes: list[int], total: int) -> None:
    as_floats = simplex_weights(np.array(votes, np.float64), total)
    assert simplex_weights(np.array(votes, np.int64), total).tolist() == as_floats.tolist()
