"""The aggregator's pure functions: exact sums, valid weights, no code left behind."""

from __future__ import annotations

from fractions import Fraction
from random import Random

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
    combined_sizes,
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
        rule, votes=votes, codes_of_candidates=of, quotas=wanted, expected=2.0 * np.maximum(profile, 1),
        generator=np.random.default_rng(0), embeddings=np.random.default_rng(1).normal(size=(candidates, 3)),
    )  # fmt: skip
    per_code = np.bincount(of[chosen.chosen], minlength=codes) if chosen.chosen.size else np.zeros(codes, int)
    assert (per_code + chosen.shortfall == wanted).all()
    assert (chosen.shortfall >= 0).all()
    if rule != "paper":
        assert np.unique(chosen.chosen).size == chosen.chosen.size


def test_the_simplex_rule_takes_the_most_voted_for() -> None:
    votes = np.array([1, 9, 3, 7], np.int64)
    chosen = select(
        "simplex", votes=votes, codes_of_candidates=np.zeros(4, np.int32), quotas=np.array([2]),
        expected=np.array([20.0]), generator=np.random.default_rng(0),
    )  # fmt: skip
    assert sorted(chosen.chosen.tolist()) == [1, 3]


def test_the_papers_draw_follows_its_weights() -> None:
    drawn = select(
        "paper", votes=np.array([10, 30, 60, -5], np.int64), codes_of_candidates=np.zeros(4, np.int32),
        quotas=np.array([20_000]), expected=np.array([100.0]), generator=np.random.default_rng(1),
    ).chosen  # fmt: skip
    counted = np.bincount(drawn, minlength=4)
    assert counted[3] == 0
    assert stats.chisquare(counted[:3], np.array([0.1, 0.3, 0.6]) * 20_000).pvalue > 1e-4


def test_the_weighted_draw_follows_its_weights_one_by_one() -> None:
    """Drawn without replacement: the pair (i, j) has probability w_i w_j / (1 - w_i) + w_j w_i / (1 - w_j)."""
    votes, weights, draws = np.array([10, 30, 60, -5], np.int64), np.array([0.1, 0.3, 0.6]), 20_000
    generator, pairs = np.random.default_rng(1), np.zeros((4, 4))
    for _ in range(draws):
        first, second = sorted(_select_from_one_code("weighted", votes, 2, profile=100, generator=generator))
        pairs[first, second] += 1
    assert pairs[:, 3].sum() == 0, "below the threshold"
    expected = [
        weights[i] * weights[j] / (1 - weights[i]) + weights[i] * weights[j] / (1 - weights[j])
        for i, j in ((0, 1), (0, 2), (1, 2))
    ]
    assert stats.chisquare([pairs[0, 1], pairs[0, 2], pairs[1, 2]], np.array(expected) * draws).pvalue > 1e-4


def test_a_soft_threshold_leaves_out_what_noise_explains() -> None:
    votes = np.array([3, 40, -2, 25, 9], np.int64)
    drawn = [
        select(
            "soft-threshold", votes=votes, codes_of_candidates=np.zeros(5, np.int32), quotas=np.array([5]),
            expected=np.array([70.0]), generator=np.random.default_rng(0), noise_variance=variance,
        ).chosen.tolist()
        for variance in (0, 100, 10**6)
    ]  # fmt: skip
    assert [sorted(chosen) for chosen in drawn[:2]] == [[0, 1, 3, 4], [1, 3]]
    assert sorted(drawn[2]) == [0, 1, 3, 4], "where nothing stands out, all positive ones are of use"


def test_ties_are_broken_at_random_and_uniformly() -> None:
    generator = np.random.default_rng(2)
    drawn = [_select_from_one_code("simplex", np.full(5, 3, np.int64), 1, 15, generator)[0] for _ in range(5000)]
    assert stats.chisquare(np.bincount(drawn, minlength=5)).pvalue > 1e-4


def _select_from_one_code(
    rule: str, votes: np.ndarray, quota: int, profile: int, generator: np.random.Generator
) -> list[int]:
    return select(
        rule, votes=votes, codes_of_candidates=np.zeros(votes.size, np.int32), quotas=np.array([quota]),
        expected=np.array([float(profile)]), generator=generator,
    ).chosen.tolist()  # fmt: skip


@pytest.mark.parametrize("rule", sorted(SELECTION_RULES))
@pytest.mark.parametrize("votes", [[], [0], [-5, -5, -9], [2**63 - 1, 0, -(2**63)], [10**6] * 3])
@pytest.mark.parametrize("quota", [0, 2, 10**6])
@pytest.mark.parametrize("profile", [-(10**6), 0, 10**12])
def test_extreme_inputs_keep_the_invariant(rule: str, votes: list[int], quota: int, profile: int) -> None:
    selection = select(
        rule, votes=np.array(votes, np.int64), codes_of_candidates=np.zeros(len(votes), np.int32),
        quotas=np.array([quota]), expected=np.array([8.0 * profile]), generator=np.random.default_rng(0),
        embeddings=np.eye(len(votes), 4), neighbours=8,
    )  # fmt: skip
    assert selection.chosen.size + selection.shortfall[0] == quota
    assert selection.shortfall[0] >= 0
    assert selection.chosen.dtype == selection.shortfall.dtype == np.int64
    if quota and votes:
        assert selection.chosen.size, "even if all votes are negative, the best candidates are of use"


def test_a_single_absurd_ballot_neither_wraps_around_nor_ends_the_run() -> None:
    top = np.iinfo(np.int64).max
    total = sum_profiles([np.array([top, 5]), np.array([top, -top - 1])])
    assert total[0] > 0 > total[1]
    weights = simplex_weights(np.array([top, 5, -top - 1]), 10)
    assert weights.tolist() == [1.0, 0.0, 0.0]


@given(st.lists(VOTES, min_size=1, max_size=5))
def test_sums_are_exact(ballots: list[np.ndarray]) -> None:
    length = min(ballot.size for ballot in ballots)
    cut = [ballot[:length] for ballot in ballots]
    assert sum_profiles(cut).tolist() == [sum(int(b[i]) for b in cut) for i in range(length)]


@given(VOTES, st.integers(1, 500), st.integers(-(10**12), 10**12))
def test_the_projection_does_not_see_a_shift_of_all_votes(votes: np.ndarray, total: int, shift: int) -> None:
    assert simplex_weights(votes + shift, total).tolist() == simplex_weights(votes, total).tolist()


@given(VOTES, st.integers(1, 500), st.randoms(use_true_random=False))
def test_weights_do_not_depend_on_the_order_of_candidates(votes: np.ndarray, total: int, shuffler: Random) -> None:
    order = list(range(votes.size))
    shuffler.shuffle(order)
    np.testing.assert_allclose(simplex_weights(votes[order], total), simplex_weights(votes, total)[order], atol=1e-12)
    np.testing.assert_allclose(clipped_weights(votes[order]), clipped_weights(votes)[order], atol=1e-12)


@given(VOTES, st.integers(1, 500))
def test_what_is_below_the_threshold_is_exactly_zero(votes: np.ndarray, total: int) -> None:
    """In exact fractions: float noise may not make a candidate useful that nobody voted for."""
    descending = sorted((int(vote) for vote in votes), reverse=True)
    thresholds = [Fraction(sum(descending[:k]) - total, k) for k in range(1, len(descending) + 1)]
    last = max(k for k, threshold in enumerate(thresholds) if descending[k] > threshold)
    assert ((simplex_weights(votes, total) > 0) == [int(vote) > thresholds[last] for vote in votes]).all()


@pytest.mark.parametrize("total", [0, -7])
def test_without_a_positive_total_one_vote_is_given_out(total: float) -> None:
    assert simplex_weights(np.array([4, 4, 1]), total).tolist() == [0.5, 0.5, 0.0]
    assert simplex_weights(np.zeros(0, np.int64), total).size == 0


def test_a_million_candidates_and_votes_sum_to_one() -> None:
    votes = np.random.default_rng(0).integers(-(10**6), 10**6, 10**6)
    for total in (1, 10**6, 10**12):
        assert simplex_weights(votes, total).sum() == pytest.approx(1)


@given(COUNTS, st.integers(0, 10**9))
def test_a_larger_count_never_gets_a_smaller_quota(profile: np.ndarray, total: int) -> None:
    given_out = quotas(profile, total)
    upwards = sorted(range(profile.size), key=lambda code: (max(0, profile[code]), -code))
    assert (np.diff(given_out[upwards]) >= 0).all()


def test_equal_remainders_go_to_the_lower_code() -> None:
    assert quotas(np.array([1, 1, 1]), 5).tolist() == [2, 2, 1]
    assert quotas(np.array([-3, 0]), 3).tolist() == [2, 1]


@pytest.mark.parametrize("profile", [None, np.array([0, -4, 0])])
def test_a_pool_without_a_profile_is_even(profile: np.ndarray | None) -> None:
    for size in range(3, 30):
        sizes = pool_sizes(profile, 3, size, 0.5)
        assert sizes.sum() == size
        assert sizes.max() - sizes.min() <= 1


def test_inputs_that_do_not_fit_together_are_refused() -> None:
    one, two = np.zeros(1, np.int64), np.zeros(2, np.int64)
    for votes, expected in ((two, one), (one, two)):
        with pytest.raises(ProtocolError, match="one vote per candidate and one count per code"):
            select(
                "simplex", votes=votes, codes_of_candidates=one, quotas=one, expected=expected.astype(float),
                generator=np.random.default_rng(0),
            )  # fmt: skip
    with pytest.raises(ProtocolError, match="shape"):
        pool_sizes(two, 3, 10, 0.5)
    with pytest.raises(StudyError, match="-1 texts"):
        quotas(one, -1)
    with pytest.raises(StudyError, match="0 codes"):
        quotas(np.zeros(0, np.int64), 1)


def test_a_rule_that_looks_at_places_does_not_go_without_embeddings() -> None:
    """It mustn't become another rule: the summary would name the wrong one."""
    with pytest.raises(ProtocolError, match="embeddings None"):
        select(
            "density", votes=np.array([3, 1]), codes_of_candidates=np.zeros(2, np.int32), quotas=np.array([1]),
            expected=np.array([4.0]), generator=np.random.default_rng(0),
        )  # fmt: skip


def test_an_unknown_rule_and_unequal_profiles_are_refused() -> None:
    nothing = np.zeros(1, np.int64)
    with pytest.raises(StudyError, match="'best'"):
        select(
            "best", votes=nothing, codes_of_candidates=nothing, quotas=nothing, expected=np.zeros(1),
            generator=np.random.default_rng(0),
        )  # fmt: skip
    with pytest.raises(ProtocolError):
        sum_profiles([])
    with pytest.raises(ProtocolError):
        sum_profiles([np.zeros(2, np.int64), np.zeros(3, np.int64)])


def test_sizes_from_profile_and_votes_have_less_noise_than_either() -> None:
    random = np.random.default_rng(5)
    units, of, k = np.array([500, 40, 0]), np.repeat([0, 1, 2], [60, 30, 4]), 8
    sigma_profile, sigma_votes = 20.0, 6.0
    errors = []
    for _ in range(400):
        votes = np.zeros(of.size, dtype=np.int64)
        for code, count in enumerate(units):
            places = np.flatnonzero(of == code)
            np.add.at(votes, random.permuted(np.tile(places, (count, 1)), axis=1)[:, : min(k, places.size)], 1)
        votes += np.rint(random.normal(0, sigma_votes, votes.size)).astype(np.int64)
        profile = units + np.rint(random.normal(0, sigma_profile, 3)).astype(np.int64)
        combined = combined_sizes(
            profile, votes, of, votes_per_unit=k, profile_variance=sigma_profile**2, vote_variance=sigma_votes**2
        )
        each = np.minimum(np.bincount(of), k)
        errors.append((profile - units, np.bincount(of, weights=votes) / each - units, combined - units))
    profile_error, vote_error, error = np.array(errors).transpose(1, 0, 2)
    assert (error.std(axis=0) < 1.02 * np.minimum(profile_error.std(axis=0), vote_error.std(axis=0))).all()
    assert (np.abs(error.mean(axis=0)) < 4 * error.std(axis=0) / 20).all()


def test_a_code_without_candidates_has_the_profile_alone() -> None:
    sizes = combined_sizes(
        np.array([7, 9]), np.array([81]), np.array([0]), votes_per_unit=1, profile_variance=1, vote_variance=1
    )
    assert sizes.tolist() == [44, 9]


def test_absurd_votes_break_no_size() -> None:
    most = np.iinfo(np.int64).max
    sizes = combined_sizes(
        np.array([most, -most]), np.array([most, -most]), np.array([0, 1]),
        votes_per_unit=1, profile_variance=1, vote_variance=1,
    )  # fmt: skip
    assert sizes[0] > 0 > sizes[1]
