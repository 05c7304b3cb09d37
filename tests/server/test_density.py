"""The ratio of documents to pool, and what it does to hubs, rims and texts that nobody voted on."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from client_weak.neighbours import comparable, nearest_candidates
from common.errors import ProtocolError
from server import density
from server.aggregate import Embedded, fresh_wanted, select
from server.density import density_ratio, told_by_neighbours, votes_of_pool

K = 4
SIMILARITIES = ("cosine", "l2", "inner")


def _cloud(seed: int, points: int, dimension: int = 24) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(points, dimension)).astype(np.float32)


def _votes(documents: NDArray[np.float32], candidates: NDArray[np.float32], similarity: str = "cosine") -> np.ndarray:
    own, others = comparable(documents, candidates, similarity)
    codes = np.zeros(len(own), np.int32), np.zeros(len(others), np.int32)
    nearest = nearest_candidates(own, codes[0], others, codes[1], neighbours=K)
    return np.bincount(nearest.ravel(), minlength=len(others))


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("block", [1 << 22, 1000])
def test_the_pool_votes_as_documents_do(similarity: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each candidate's K nearest others, by the sites' own neighbours: all but the candidate itself."""
    monkeypatch.setattr(density, "_BLOCK", block)
    pool, expected = _cloud(0, 150), np.zeros(150)
    for index in range(150):
        others = np.delete(np.arange(150), index)
        expected[others] += _votes(pool[[index]], pool[others], similarity)
    found = votes_of_pool(pool, K, similarity)
    assert found.sum() == pytest.approx(K * 150)
    # Near-ties may fall the other way in single precision.
    assert np.abs(found - expected).sum() <= 4


def test_of_many_candidates_a_part_votes_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = _cloud(1, 4_000, 6)
    whole = votes_of_pool(pool, K, "l2")
    monkeypatch.setattr(density, "MOST_VOTERS", 2_000)
    part = votes_of_pool(pool, K, "l2")
    assert part.sum() == pytest.approx(K * 4_000)
    assert np.corrcoef(whole, part)[0, 1] > 0.5


def test_documents_that_are_like_the_pool_have_the_same_ratio_at_hubs_and_rims() -> None:
    pool, documents = _cloud(2, 400), _cloud(3, 8_000)
    votes = _votes(documents, pool, "l2") / 20.0
    of_pool = votes_of_pool(pool, K, "l2")
    hubs, rims = of_pool >= np.quantile(of_pool, 0.9), of_pool <= np.quantile(of_pool, 0.3)
    ratios = density_ratio(votes, of_pool, K)
    plain, corrected = (x[hubs].mean() / x[rims].mean() for x in (votes, ratios))
    assert plain > 5, "twin: plain votes pick hubs, whatever the documents"
    assert corrected < plain / 2


def test_a_new_text_is_told_by_those_near_to_it() -> None:
    pool = np.concatenate([_cloud(4, 50, 8) + 6, _cloud(5, 50, 8) - 6])
    ratios = np.repeat([3.0, 0.5], 50)
    told = told_by_neighbours(ratios, pool, np.concatenate([_cloud(6, 5, 8) + 6, _cloud(7, 5, 8) - 6]))
    np.testing.assert_allclose(told, np.repeat([3.0, 0.5], 5))
    assert told_by_neighbours(ratios[:0], pool[:0], pool[:3]).tolist() == [0, 0, 0]


def test_without_others_no_candidate_has_votes() -> None:
    assert votes_of_pool(_cloud(0, 1), K, "cosine").tolist() == [0]
    assert votes_of_pool(_cloud(0, 0), K, "cosine").size == 0
    assert votes_of_pool(_cloud(0, 3), K, "cosine").tolist() == [2, 2, 2]


def test_an_embedding_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ProtocolError, match="isn't finite"):
        votes_of_pool(np.full((3, 2), np.nan, np.float32), K, "cosine")


def test_fresh_texts_near_winners_win_over_candidates_without_votes() -> None:
    """Two clusters of candidates; documents are in the first, where there are too few candidates."""
    pool = np.concatenate([_cloud(8, 10, 8) + 6, _cloud(9, 40, 8) - 6])
    fresh = np.concatenate([_cloud(10, 30, 8) + 6, _cloud(11, 30, 8) - 6])
    votes = np.concatenate([np.full(10, 40), np.zeros(40, np.int64)])
    found = select(
        "density", votes=votes, codes_of_candidates=np.zeros(50, np.int32), quotas=np.array([30]),
        expected=np.array([400.0]), generator=np.random.default_rng(0), embeddings=pool, neighbours=K,
        fresh=Embedded(np.zeros(60, np.int32), fresh),
    )  # fmt: skip
    assert found.chosen.max() < 10
    assert found.fresh.max() < 30
    assert found.chosen.size + found.fresh.size == 30
    assert found.shortfall.tolist() == [0]


def test_fresh_texts_stay_in_their_code() -> None:
    found = select(
        "density", votes=np.array([5, 5]), codes_of_candidates=np.array([0, 1], np.int32), quotas=np.array([2, 3]),
        expected=np.array([5.0, 5.0]), generator=np.random.default_rng(0), embeddings=_cloud(0, 2), neighbours=1,
        fresh=Embedded(np.array([1, 0, 1, 0], np.int32), _cloud(1, 4)),
    )  # fmt: skip
    assert sorted(found.chosen.tolist()) == [0, 1]
    assert np.bincount(np.array([1, 0, 1, 0])[found.fresh], minlength=2).tolist() == [1, 2]
    assert found.shortfall.tolist() == [0, 0]


def test_how_many_fresh_texts_make_the_choice() -> None:
    assert fresh_wanted(np.array([10, 10, 0, 3]), np.array([4, 40, 0, 0]), 2.5).tolist() == [21, 0, 0, 8]
