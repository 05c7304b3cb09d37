"""What a weak site's answer can be at most: honest ones stay, and stuffing moves no more than its public cap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.privacy.bounding import profile_counts, vote_counts
from common.privacy.noise import discrete_gaussian
from common.site.plan import weak_plan
from common.study import Study
from server.aggregate import sum_profiles
from server.strategies.plausibility import band, plausible, vote_bounds
from tests.hospitals import small_study

POOL = np.repeat(np.arange(4, dtype=np.int32), 30)
TOP = np.iinfo(np.int64).max


def _study(unit: str = "record", max_units: int = 10_000, **privacy: Any) -> Study:
    values = small_study(Path("package:none"), privacy={"unit": unit, **privacy}, pool={"size": 120})
    values["federation"]["max_units"] = max_units
    return Study.model_validate(values | {"voting": {"neighbours": 3}})


def _honest(study: Study, seed: int, units: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """A site's answer by the real mechanisms; its documents all vote for few candidates, as far as bounding allows."""
    random, plan = np.random.default_rng(seed), weak_plan(study)
    of_unit = np.repeat(np.arange(units), 1 if study.privacy.unit == "record" else 3)
    codes = random.integers(0, 4, of_unit.size)
    nearest = 30 * codes[:, None] + np.arange(3)
    profile = profile_counts(codes, of_unit, number_of_codes=4, codes_per_unit=study.privacy.codes_per_unit)
    ballot = vote_counts(nearest, of_unit, candidates=POOL.size, votes_per_unit=study.votes_per_unit)
    return discrete_gaussian(profile, plan.profile.scale).array, discrete_gaussian(ballot, plan.votes.scale).array


@pytest.mark.parametrize("epsilon", [0.5, 8.0])
@pytest.mark.parametrize(("unit", "codes"), [("record", 1), ("patient", 1), ("patient", 2), ("patient", 4)])
@pytest.mark.parametrize("units", [0, 400])
def test_an_honest_answer_stays_as_it_is(unit: str, codes: int, units: int, epsilon: float) -> None:
    study = _study(unit, epsilon=epsilon, codes_per_unit=codes)
    for seed in range(20):
        profile, ballot = _honest(study, seed, units)
        found = plausible(study, weak_plan(study), POOL, profile, ballot)
        assert not found.capped
        np.testing.assert_array_equal(found.profile, profile)
        np.testing.assert_array_equal(found.ballot, ballot)


def test_noise_beyond_a_band_is_as_rare_as_it_says() -> None:
    from common.privacy.values import ExactCounts

    noise = np.abs(discrete_gaussian(ExactCounts(np.zeros(20_000, np.int64), cells_per_unit=1), 5.0).array)
    assert (noise > band(5.0, 0.01)).mean() < 0.02
    assert (noise > band(5.0, 1e-12)).sum() == 0


@pytest.mark.parametrize("value", [TOP, -TOP - 1, 1_000_000])
@pytest.mark.parametrize("unit", ["record", "patient"])
def test_a_stuffed_ballot_moves_no_candidate_further_than_its_claim(unit: str, value: int) -> None:
    study = _study(unit)
    plan = weak_plan(study)
    others = sum_profiles([plausible(study, plan, POOL, *_honest(study, seed)).ballot for seed in range(3)])
    profile = np.array([50, 0, 0, 0], dtype=np.int64)
    hostile = plausible(study, plan, POOL, profile, np.full(POOL.size, value))
    assert hostile.capped
    moved = np.abs(sum_profiles([others, hostile.ballot]) - others)
    noise = band(plan.votes.scale, 1e-15)
    claimed = 50 + 4 * band(plan.profile.scale, 1e-15)
    assert moved[POOL == 0].max() <= claimed + noise
    if unit == "record":
        assert moved[POOL != 0].max() <= band(plan.profile.scale, 1e-15) + noise


def test_without_the_cap_one_site_decides_alone() -> None:
    """Twin."""
    study = _study()
    others = sum_profiles([_honest(study, seed)[1] for seed in range(3)])
    assert np.abs(sum_profiles([others, np.full(POOL.size, TOP)]) - others).max() > 1e18


def test_a_code_gets_no_more_votes_than_its_units_cast() -> None:
    study = _study()
    plan = weak_plan(study)
    ballot = np.zeros(POOL.size, dtype=np.int64)
    ballot[:30] = 200
    found = plausible(study, plan, POOL, np.array([200, 0, 0, 0]), ballot)
    assert found.capped
    units = 200 + band(plan.profile.scale, 1e-15)
    assert found.ballot[:30].sum() <= 3 * units + band(plan.votes.scale * 30**0.5, 1e-15) < ballot.sum()
    assert len(set(found.ballot[:30].tolist())) == 1, "scaled alike"


def test_a_site_counts_for_no_more_units_than_the_study_allows() -> None:
    study = _study(max_units=500)
    plan = weak_plan(study)
    found = plausible(study, plan, POOL, np.full(4, 10**9), np.full(POOL.size, 10**9))
    assert found.capped
    assert found.profile.max() <= 500 + band(plan.profile.scale, 1e-15)
    assert found.ballot.max() <= 500 + band(plan.votes.scale, 1e-15)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(-TOP - 1, TOP) | st.integers(-50, 50), min_size=4, max_size=4),
    st.lists(st.integers(-TOP - 1, TOP) | st.integers(-50, 50), min_size=12, max_size=12),
    st.sampled_from(["record", "patient"]),
)
def test_capping_is_whole_numbers_within_bounds_and_done_once(profile: list[int], ballot: list[int], unit: str) -> None:
    study = _study(unit)
    plan, pool = weak_plan(study), np.repeat(np.array([0, 2], dtype=np.int32), 6)
    once = plausible(study, plan, pool, np.array(profile), np.array(ballot))
    assert once.ballot.dtype == once.profile.dtype == np.int64
    assert np.abs(once.ballot).max() <= 10_000 + band(plan.votes.scale, 1e-15)
    again = plausible(study, plan, pool, once.profile, once.ballot)
    np.testing.assert_array_equal(again.profile, once.profile)
    assert np.abs(again.ballot - once.ballot).max() <= 1


def _influence_is_within_the_public_cap(study: Study, profile: np.ndarray, ballot: np.ndarray, counted: Any) -> bool:
    """Whether a code's summed votes move by at most the site's public cap when it takes part; ``counted`` caps."""
    plan = weak_plan(study)
    others = sum_profiles([_honest(study, seed)[1] for seed in range(2)])
    found = counted(study, plan, POOL, profile, ballot)
    bounds = vote_bounds(study, plan, POOL, plausible(study, plan, POOL, profile, ballot).profile)
    moved = _per_code(sum_profiles([others, found.ballot])) - _per_code(others)
    # Rounding towards 0 may leave up to one vote a candidate of what the negative ones were to be balanced with.
    least = np.minimum(bounds.least_sums, -np.bincount(POOL))
    return bool((least <= moved).all() and (moved <= bounds.most_sums).all() and moved.sum() <= bounds.most_total + 120)


def _per_code(votes: np.ndarray) -> np.ndarray:
    return np.array([int(votes[code == POOL].sum()) for code in range(4)])


def _as_sent(_study: Any, _plan: Any, _pool: Any, profile: np.ndarray, ballot: np.ndarray) -> Any:
    return type("AsSent", (), {"profile": profile, "ballot": ballot, "capped": False})


COUNTS = st.integers(-TOP - 1, TOP) | st.integers(-500, 500) | st.sampled_from([0, TOP, -TOP - 1])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(COUNTS, min_size=4, max_size=4),
    st.lists(COUNTS, min_size=4, max_size=4),
    st.sampled_from(["record", "patient"]),
)
def test_no_answer_moves_a_codes_votes_further_than_the_public_cap(
    profile: list[int], of: list[int], unit: str
) -> None:
    ballot = np.array(of, dtype=np.int64)[POOL]
    ballot[::7] = -ballot[::7] // 2
    assert _influence_is_within_the_public_cap(_study(unit), np.array(profile), ballot, plausible)


@pytest.mark.parametrize("value", [400, -400], ids=str)
def test_without_the_cap_the_same_answer_moves_them_further(value: int) -> None:
    """Twin."""
    answer = np.array([50, 0, 0, 0]), np.full(POOL.size, value)
    assert _influence_is_within_the_public_cap(_study(), *answer, plausible)
    assert not _influence_is_within_the_public_cap(_study(), *answer, _as_sent)


def test_a_code_that_a_site_does_not_claim_moves_by_no_more_than_noise() -> None:
    study = _study()
    plan = weak_plan(study)
    found = plausible(study, plan, POOL, np.array([300, 0, 0, 0]), np.full(POOL.size, TOP))
    noise = 3 * band(plan.profile.scale, 1e-15) + band(plan.votes.scale * 30**0.5, 1e-15)
    assert _per_code(found.ballot)[1:].max() <= noise


def test_a_site_counts_for_the_studys_units_over_all_codes_together() -> None:
    study = _study(max_units=500)
    plan = weak_plan(study)
    found = plausible(study, plan, POOL, np.full(4, 10**9), np.full(POOL.size, 10**9))
    assert found.profile.sum() <= 500 + band(plan.profile.scale * 2, 1e-15)
    assert found.ballot.sum() <= 3 * 500 + band(plan.votes.scale * POOL.size**0.5, 1e-15)


def test_a_patient_votes_under_many_codes_but_not_more_often_for_it() -> None:
    study = _study("patient")
    plan = weak_plan(study)
    found = plausible(study, plan, POOL, np.array([300, 0, 0, 0]), np.full(POOL.size, TOP))
    units = 300 + band(plan.profile.scale * 2, 1e-15)
    assert found.ballot.sum() <= 3 * units + band(plan.votes.scale * POOL.size**0.5, 1e-15)


def test_negative_stuffing_takes_no_more_than_noise_may() -> None:
    study = _study()
    plan = weak_plan(study)
    found = plausible(study, plan, POOL, np.array([300, 0, 0, 0]), np.full(POOL.size, -TOP - 1))
    assert found.capped
    assert _per_code(found.ballot).min() >= -band(plan.votes.scale * 30**0.5, 1e-15) - 30


def test_a_site_larger_than_the_study_counts_is_scaled_as_a_whole() -> None:
    study = _study(max_units=500)
    ballot = np.zeros(POOL.size, dtype=np.int64)
    ballot[[0, 1, 30]] = [2000, 1000, 1000]
    found = plausible(study, weak_plan(study), POOL, np.array([2000, 1000, 0, 0]), ballot)
    assert found.capped
    np.testing.assert_allclose(found.profile[:2] / found.profile[1], [2, 1], rtol=0.02)
    np.testing.assert_allclose(found.ballot[[0, 1, 30]] / found.ballot[1], [2, 1, 1], rtol=0.02)


def test_codes_without_candidates_and_pools_without_any_are_fine() -> None:
    study = _study()
    plan = weak_plan(study)
    pool = np.full(7, 2, dtype=np.int32)
    found = plausible(study, plan, pool, np.array([5, 5, 5, 5]), np.full(7, TOP))
    assert found.ballot.max() < 500
    found = plausible(study, plan, pool[:0], np.array([5, 5, 5, 5]), np.zeros(0, dtype=np.int64))
    assert not found.capped
    assert found.ballot.shape == (0,)


@pytest.mark.timeout(120)
def test_many_codes_are_not_looked_at_one_by_one() -> None:
    values = small_study(Path("package:none"), pool={"size": 200_000})
    values["codes"]["attributes"] = [{"name": "topic", "values": list(range(20_000))}]
    study = Study.model_validate(values | {"voting": {"neighbours": 3}})
    pool = np.repeat(np.arange(20_000, dtype=np.int32), 10)
    found = plausible(study, weak_plan(study), pool, np.full(20_000, TOP), np.full(pool.size, TOP))
    assert found.capped
