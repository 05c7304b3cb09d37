"""Bounding: brute force over neighbours. Adding one unit moves at most the stated cells, each by at most 1."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from common.privacy.bounding import profile_counts, sample_documents, vote_counts
from common.privacy.noise import Csprng

CODES, CANDIDATES, K = 4, 9, 3


@st.composite
def hospital_and_extra_unit(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Codes, units and nearest lists of some documents, and which unit is the extra one."""
    units = np.array(draw(st.lists(st.integers(0, 5), min_size=1, max_size=25)), dtype=np.int32)
    codes = np.array(draw(st.lists(st.integers(0, CODES - 1), min_size=units.size, max_size=units.size)), np.int32)
    nearest = np.full((units.size, K), -1, dtype=np.int64)
    for row in nearest:
        known = draw(st.integers(0, K))
        row[:known] = draw(st.permutations(range(CANDIDATES)))[:known]
    return codes, units, nearest, int(draw(st.sampled_from(sorted(set(units.tolist())))))


@settings(max_examples=300, deadline=None)
@given(hospital_and_extra_unit(), st.integers(1, CODES))
def test_one_unit_moves_the_profile_by_at_most_c_cells(
    case: tuple[np.ndarray, np.ndarray, np.ndarray, int], codes_per_unit: int
) -> None:
    codes, units, _, extra = case
    without = units != extra
    options = {"number_of_codes": CODES, "codes_per_unit": codes_per_unit}
    with_unit = profile_counts(codes, units, **options)
    moved = with_unit.counts - profile_counts(codes[without], units[without], **options).counts
    assert set(moved.tolist()) <= {0, 1}
    assert 1 <= moved.sum() <= codes_per_unit == with_unit.cells_per_unit


@settings(max_examples=300, deadline=None)
@given(hospital_and_extra_unit(), st.integers(1, 5))
def test_one_unit_moves_the_votes_by_at_most_k_cells(
    case: tuple[np.ndarray, np.ndarray, np.ndarray, int], votes_per_unit: int
) -> None:
    _, units, nearest, extra = case
    without = units != extra
    options = {"candidates": CANDIDATES, "votes_per_unit": votes_per_unit}
    with_unit = vote_counts(nearest, units, **options)
    moved = with_unit.counts - vote_counts(nearest[without], units[without], **options).counts
    assert set(moved.tolist()) <= {0, 1}
    assert moved.sum() <= votes_per_unit == with_unit.cells_per_unit


def test_counting_documents_instead_of_units_would_break_the_bound() -> None:
    """Twin: a patient with five notes, counted by note."""
    codes, units = np.zeros(5, np.int32), np.zeros(5, np.int32)
    naive = np.bincount(codes, minlength=CODES)
    bounded = profile_counts(codes, units, number_of_codes=CODES, codes_per_unit=1).counts
    assert naive.max() == 5
    assert bounded.max() == 1


def test_notes_of_a_patient_vote_in_turn() -> None:
    nearest = np.array([[0, 1, 2], [0, 3, 4], [5, 6, 7]])
    votes = vote_counts(nearest, np.zeros(3, np.int32), candidates=CANDIDATES, votes_per_unit=4).counts
    assert np.flatnonzero(votes).tolist() == [0, 1, 3, 5], "first choices 0 and 5, then second choices 1 and 3"


def test_a_record_votes_for_each_of_its_k_nearest_once() -> None:
    votes = vote_counts(np.array([[2, 0, 1], [2, 4, -1]]), np.arange(2), candidates=5, votes_per_unit=3).counts
    assert votes.tolist() == [1, 1, 2, 0, 1]


def test_a_step_draws_one_document_of_each_sampled_unit() -> None:
    order, offsets = np.arange(10), np.array([0, 4, 5, 10])
    seen: set[int] = set()
    for _ in range(200):
        batch = sample_documents(order, offsets, sample_rate=1.0, randomness=Csprng())
        assert batch.size == 3
        assert (np.searchsorted(offsets, batch, side="right") - 1).tolist() == [0, 1, 2]
        seen |= set(batch.tolist())
    assert seen == set(range(10)), "every document has its turn"


def test_empty_hospitals_count_nothing() -> None:
    none = np.zeros(0, np.int32)
    assert profile_counts(none, none, number_of_codes=3, codes_per_unit=1).counts.tolist() == [0, 0, 0]
    empty = np.zeros((0, 2), np.int64)
    assert vote_counts(empty, none, candidates=4, votes_per_unit=2).counts.tolist() == [0] * 4
    batch = sample_documents(none, np.zeros(1, np.int64), sample_rate=0.5, randomness=Csprng())
    assert batch.size == 0
