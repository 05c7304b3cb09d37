"""Nearest neighbours within the code: exact, in bounded blocks, and each document for itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client_weak import neighbours as module
from client_weak.neighbours import NO_CANDIDATE, comparable, nearest_candidates, on_lattice
from common.privacy.bounding import vote_counts


def _unit(rows: int, seed: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(rows, 8)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize("block", [10, 1000, 4_000_000])
def test_nearest_equal_a_brute_force_search(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    documents, candidates = _unit(60, 0), _unit(40, 1)
    document_codes = np.random.default_rng(2).integers(0, 4, 60)
    candidate_codes = np.random.default_rng(3).integers(0, 3, 40)
    found = nearest_candidates(documents, document_codes, candidates, candidate_codes, neighbours=5)
    for row in range(60):
        same = np.flatnonzero(candidate_codes == document_codes[row])
        ranked = same[np.argsort(-(candidates[same] @ documents[row]), kind="stable")][:5]
        expected = np.r_[ranked, np.full(5 - ranked.size, NO_CANDIDATE)]
        np.testing.assert_array_equal(found[row], expected)


def test_a_code_with_fewer_candidates_than_k_gives_fewer_votes() -> None:
    found = nearest_candidates(_unit(3, 0), np.zeros(3), _unit(2, 1), np.zeros(2), neighbours=4)
    assert (np.sort(found[:, :2], axis=1) == [0, 1]).all()
    assert (found[:, 2:] == NO_CANDIDATE).all()


def test_ties_go_to_the_lower_index() -> None:
    same = np.tile(_unit(1, 0), (6, 1))
    found = nearest_candidates(same[:1], np.zeros(1), same, np.zeros(6), neighbours=6)
    assert found.tolist() == [[0, 1, 2, 3, 4, 5]]


def test_no_documents_no_candidates() -> None:
    empty = np.zeros((0, 8), np.float32)
    assert nearest_candidates(empty, np.zeros(0), _unit(2, 0), np.zeros(2), neighbours=2).shape == (0, 2)
    assert (nearest_candidates(_unit(2, 0), np.zeros(2), empty, np.zeros(0), neighbours=2) == NO_CANDIDATE).all()


def _near_ties() -> tuple[np.ndarray, np.ndarray]:
    """Candidates that no document can tell apart but by the last bits of a product."""
    noise = np.random.default_rng(5).normal(size=(300, 256)).astype(np.float32)
    documents = np.random.default_rng(6).normal(size=(200, 256)).astype(np.float32)
    candidates = np.ones((300, 256), np.float32) + 1e-5 * noise
    return _rows(documents), _rows(candidates)


def _rows(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def _moved_by_others(documents: np.ndarray, candidates: np.ndarray) -> int:
    """Documents whose nearest candidates change when they are looked up alone."""
    one_code = np.zeros(len(documents)), np.zeros(len(candidates))
    together = nearest_candidates(documents, one_code[0], candidates, one_code[1], neighbours=8)
    alone = [
        nearest_candidates(documents[i : i + 1], one_code[0][:1], candidates, one_code[1], neighbours=8)[0]
        for i in range(len(documents))
    ]
    return sum(not np.array_equal(a, t) for a, t in zip(alone, together, strict=True))


def test_what_a_document_votes_for_depends_on_no_other_document() -> None:
    assert _moved_by_others(*_near_ties()) == 0


def test_float32_products_alone_would_let_one_document_move_anothers_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twin: the same products, taken for exact."""
    monkeypatch.setattr(module, "_most_wrong", lambda others: np.float32(0))
    assert _moved_by_others(*_near_ties()) > 0


def _by_brute_force(documents: np.ndarray, candidates: np.ndarray, neighbours: int) -> np.ndarray:
    """In whole numbers."""
    exact = on_lattice(documents).astype(np.int64) @ on_lattice(candidates).astype(np.int64).T
    return np.argsort(-exact, axis=1, kind="stable")[:, :neighbours]


@pytest.mark.parametrize("repeated", [False, True], ids=["distinct", "repeated"])
@pytest.mark.parametrize("candidates", [7, 130, 1000])
@pytest.mark.parametrize("dimension", [3, 256])
def test_ranks_are_those_of_exact_products(dimension: int, candidates: int, repeated: bool) -> None:
    random = np.random.default_rng(candidates + dimension)
    own = _rows(random.normal(size=(150, dimension))).astype(np.float32)
    others = _rows(random.normal(size=(candidates, dimension))).astype(np.float32)
    if repeated:
        others = others[random.integers(0, 5, candidates)]
    found = nearest_candidates(own, np.zeros(150), others, np.zeros(candidates), neighbours=6)
    np.testing.assert_array_equal(found, _by_brute_force(own, others, 6))


def test_a_product_is_never_more_wrong_than_what_is_allowed_for() -> None:
    for dimension in (2, 64, 1024):
        own = _rows(np.abs(np.random.default_rng(dimension).normal(size=(200, dimension)))).astype(np.float32)
        a, b = on_lattice(own[:100]), on_lattice(own[100:])
        wrong = np.abs((a @ b.T).astype(np.float64) - a.astype(np.float64) @ b.astype(np.float64).T).max()
        assert wrong <= module._most_wrong(b)


@pytest.mark.parametrize("similarity", ["cosine", "l2", "inner"])
def test_each_similarity_ranks_as_its_formula_does(similarity: Any) -> None:
    random = np.random.default_rng(8)
    a, b = random.normal(size=(50, 12)).astype(np.float32), (5 * random.normal(size=(90, 12))).astype(np.float32)
    b *= random.uniform(0.1, 3, size=(90, 1)).astype(np.float32)
    formula = {
        "cosine": lambda: (a / np.linalg.norm(a, axis=1, keepdims=True)) @ _rows(b).T,
        "l2": lambda: -np.linalg.norm(a[:, None] - b[None], axis=2),
        "inner": lambda: a @ b.T,
    }[similarity]()
    own, others = comparable(a, b, similarity)
    assert max(np.linalg.norm(own, axis=1).max(), np.linalg.norm(others, axis=1).max()) <= 1 + 1e-6
    found = nearest_candidates(own, np.zeros(50), others, np.zeros(90), neighbours=5)
    np.testing.assert_array_equal(found, np.argsort(-formula, axis=1, kind="stable")[:, :5])


@pytest.mark.parametrize("similarity", ["cosine", "l2", "inner"])
def test_a_document_is_made_comparable_by_itself(similarity: Any) -> None:
    random = np.random.default_rng(9)
    a, b = random.normal(size=(30, 12)).astype(np.float32), random.normal(size=(9, 12)).astype(np.float32)
    together, others = comparable(a, b, similarity)
    for i in range(30):
        alone, same = comparable(a[i : i + 1], b, similarity)
        np.testing.assert_array_equal(alone[0], together[i])
        np.testing.assert_array_equal(same, others)


@pytest.mark.parametrize("similarity", ["cosine", "l2", "inner"])
def test_zero_vectors_and_no_vectors_are_comparable(similarity: Any) -> None:
    own, others = comparable(np.zeros((2, 4), np.float32), np.zeros((3, 4), np.float32), similarity)
    assert np.isfinite(own).all()
    assert np.isfinite(others).all()
    none, _ = comparable(np.zeros((0, 4), np.float32), np.zeros((3, 4), np.float32), similarity)
    assert len(none) == 0


@st.composite
def _neighbours(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    """Vectors on few points, so that there are ties; codes with few candidates or none; and the extra unit."""
    points = _unit(6, 11)
    documents = np.array(draw(st.lists(st.integers(0, 5), min_size=1, max_size=14)))
    candidates = np.array(draw(st.lists(st.integers(0, 5), min_size=1, max_size=12)))
    codes = np.array(draw(st.lists(st.integers(0, 2), min_size=documents.size, max_size=documents.size)))
    pool_codes = np.array(draw(st.lists(st.integers(0, 2), min_size=candidates.size, max_size=candidates.size)))
    units = np.array(draw(st.lists(st.integers(0, 4), min_size=documents.size, max_size=documents.size)))
    extra = int(draw(st.sampled_from(sorted(set(units.tolist())))))
    return points[documents], codes, units, points[candidates], pool_codes, extra


@settings(max_examples=300, deadline=None)
@given(_neighbours(), st.integers(1, 5), st.integers(1, 6))
def test_one_unit_moves_at_most_r_cells_of_the_whole_vote_by_one(case: Any, neighbours: int, votes: int) -> None:
    documents, codes, units, candidates, pool_codes, extra = case

    def ballot(keep: np.ndarray) -> np.ndarray:
        nearest = nearest_candidates(documents[keep], codes[keep], candidates, pool_codes, neighbours=neighbours)
        return vote_counts(nearest, units[keep], candidates=len(candidates), votes_per_unit=votes).counts

    moved = ballot(np.ones(units.size, bool)) - ballot(units != extra)
    assert set(moved.tolist()) <= {0, 1}
    assert moved.sum() <= votes
