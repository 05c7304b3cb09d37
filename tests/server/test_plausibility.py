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
from server.strategies.plausibility import band, plausible
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


@pytest.mark.parametrize("unit", ["record", "patient"])
@pytest.mark.parametrize("units", [0, 400])
def test_an_honest_answer_stays_as_it_is(unit: str, units: int) -> None:
    study = _study(unit, epsilon=0.5)
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
