"""The aggregator's pure functions: exact sums, valid weights, no code left behind."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.optimize import brentq

from common.errors import ProtocolError, StudyError
from server.aggregate import (
    SELECTION_RULES,
    clipped_weights,
    pool_sizes,
    quotas,
    select,
    simplex_weights,
    sum_profiles,
)

COUNTS = st.lists(st.integers(-1000, 10_000), min_size=1, max_size=30).map(lambda v: np.array(v, np.int64))
VOTES = st.lists(st.integers(-50, 50), min_size=1, max_size=40).map(lambda v: np.array(v, np.int64))


@given(COUNTS, st.integers(0, 10**12))
def test_quotas_sum_exactly_and_are_within_one_of_the_proportion(profile: np.ndarray, total: int) -> None:
    given_out = quotas(profile, total)
    assert int(given_out.sum()) == total
    shares = [max(0, int(c)) for c in profile]
    shares = shares if any(shares) else [1] * len(shares)
    for quota, share in zip(given_out.tolist(), shares, strict=True):
        assert abs(quota * sum(shares) - total * share) < sum(shares)


@given(COUNTS, st.integers(1, 10_000))
def test_a_code_that_nobody_holds_gets_nothing_unless_nobody_holds_any(profile: np.ndarray, total: int) -> None:
    given_out = quotas(profile, total)
    if (profile > 0).any():
        assert (given_out[profile <= 0] == 0).all()
    else:
        assert given_out.max() - given_out.min() <= 1


@given(COUNTS, st.floats(0, 1), st.integers(0, 500))
def test_pool_sizes_sum_exactly_and_every_code_gets_a_candidate(profile: np.ndarray, floor: float, more: int) -> None:
    size = profile.size + more
    sizes = pool_sizes(profile, profile.size, size, floor)
    assert sizes.sum() == size
    assert sizes.min() >= 1
    assert sizes.min() >= int(size * floor) // profile.size - 1, "the floor is spread evenly"


def test_a_pool_smaller_than_the_codes_is_refused() -> None:
    with pytest.raises(StudyError, match="fewer than the 3 codes"):
        pool_sizes(None, 3, 2, 0.5)


@given(VOTES, st.floats(1, 500))
def test_simplex_weights_are_the_nearest_point_of_the_simplex(votes: np.ndarray, total: float) -> None:
    weights = simplex_weights(votes, total)
    assert weights.min() >= 0
    assert weights.sum() == pytest.approx(1)
    # Reference: the projection is max(v - t, 0) for the one threshold t at which it sums to the total.
    threshold = brentq(lambda t: np.maximum(votes - t, 0).sum() - total, votes.min() - total - 1, votes.max())
    np.testing.assert_allclose(weights * total, np.maximum(votes - threshold, 0), atol=1e-6 * max(1, total))


@given(VOTES, st.floats(1, 500))
def test_more_votes_never_weigh_less(votes: np.ndarray, total: float) -> None:
    for weights in (simplex_weights(votes, total), clipped_weights(votes)):
        by_votes = weights[np.argsort(votes, kind="stable")]
        assert (np.diff(by_votes) >= -1e-12).all()


@given(VOTES)
def test_clipped_weights_sum_to_one_even_if_all_votes_are_negative(votes: np.ndarray) -> None:
    for values in (votes, -np.abs(votes)):
        assert clipped_weights(values).sum() == pytest.approx(1)


def test_clipping_keeps_mass_on_junk_that_the_projection_drops() -> None:
    """500 candidates that nobody voted for, noise of 3, and 10 that 20 units each voted for."""
    generator = np.random.default_rng(0)
    votes = np.r_[np.full(10, 20), np.zeros(500)].astype(np.int64) + np.rint(generator.normal(0, 3, 510)).astype(
        np.int64
    )
    good = [weights[:10].sum() for weights in (simplex_weights(votes, 200), clipped_weights(votes))]
    assert good[0] > 0.7
    assert good[0] > 2 * good[1]


@settings(deadline=None)
@given(st.sampled_from(sorted(SELECTION_RULES)), st.integers(1, 6), st.data())
def test_chosen_and_shortfall_make_up_every_quota(rule: str, codes: int, data: st.DataObject) -> None:
    candidates = data.draw(st.integers(0, 60))
    of = np.array(data.draw(st.lists(st.integers(0, codes - 1), min_size=candidates, max_size=candidates)), np.int32)
    votes = np.array(data.draw(st.lists(st.integers(-20, 20), min_size=candidates, max_size=candidates)), np.int64)
    wanted = np.array(data.draw(st.lists(st.integers(0, 30), min_size=codes, max_size=codes)), np.int64)
    profile = np.array(data.draw(st.lists(st.integers(-5, 40), min_size=codes, max_size=codes)), np.int64)
    chosen = select(
        rule, votes=votes, codes_of_candidates=of, quotas=wanted, neighbours=2, profile=profile,
        generator=np.random.default_rng(0),
    )  # fmt: skip
    per_code = np.bincount(of[chosen.chosen], minlength=codes) if chosen.chosen.size else np.zeros(codes, int)
    assert (per_code + chosen.shortfall == wanted).all()
    assert (chosen.shortfall >= 0).all()
    if rule != "paper":
        assert np.unique(chosen.chosen).size == chosen.chosen.size


def test_the_default_rule_takes_the_most_voted_for() -> None:
    votes = np.array([1, 9, 3, 7], np.int64)
    chosen = select(
        "simplex", votes=votes, codes_of_candidates=np.zeros(4, np.int32), quotas=np.array([2]), neighbours=1,
        profile=np.array([20]), generator=np.random.default_rng(0),
    )  # fmt: skip
    assert sorted(chosen.chosen.tolist()) == [1, 3]


@pytest.mark.parametrize(("rule", "weights"), [("paper", [0.1, 0.3, 0.6, 0.0])])
def test_the_papers_draw_follows_its_weights(rule: str, weights: list[float]) -> None:
    drawn = select(
        rule, votes=np.array([10, 30, 60, -5], np.int64), codes_of_candidates=np.zeros(4, np.int32),
        quotas=np.array([20_000]), neighbours=1, profile=np.array([100]), generator=np.random.default_rng(1),
    ).chosen  # fmt: skip
    counted = np.bincount(drawn, minlength=4)
    assert counted[3] == 0
    assert stats.chisquare(counted[:3], np.array(weights[:3]) * 20_000).pvalue > 1e-4


def test_an_unknown_rule_and_unequal_profiles_are_refused() -> None:
    nothing = np.zeros(1, np.int64)
    with pytest.raises(StudyError, match="'best'"):
        select(
            "best", votes=nothing, codes_of_candidates=nothing, quotas=nothing, neighbours=1, profile=nothing,
            generator=np.random.default_rng(0),
        )  # fmt: skip
    with pytest.raises(ProtocolError):
        sum_profiles([])
    with pytest.raises(ProtocolError):
        sum_profiles([np.zeros(2, np.int64), np.zeros(3, np.int64)])
