"""What is known of a code's size and of its votes: from public noise and noisy counts alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from common.study import Study
from server.aggregate import Selection, select
from server.sizes import expected_votes, votes_tell_sizes
from tests.hospitals import small_study

UNITS = np.array([10, -3, 4, 7])
OF = np.array([0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2], np.int32)
"""Two candidates under the first code, three, thirteen, none."""


def _records() -> Study:
    return Study.model_validate(small_study(Path("tiny")) | {"voting": {"neighbours": 8}})


def _patients() -> Study:
    made = small_study(Path("tiny"), privacy={"unit": "patient", "codes_per_unit": 2})
    return Study.model_validate(made | {"voting": {"neighbours": 8, "votes_per_unit": 8}})


def test_a_record_gives_k_votes_in_its_code_or_one_to_each_candidate() -> None:
    """Negative sizes are noise around nothing, but one unit's votes are there to give out."""
    found = expected_votes(_records(), OF, UNITS, [np.zeros(OF.size, np.int64)])
    assert found.tolist() == [2 * 10, 3 * 1, 8 * 4, 0]


def test_where_votes_spread_over_codes_a_code_has_what_the_ballots_sum_to() -> None:
    """A patient's R votes are over all its codes: K times the profile would count them once for every code."""
    study, votes = _patients(), np.ones(OF.size, np.int64)
    assert votes_tell_sizes(_records())
    assert not votes_tell_sizes(study)
    assert expected_votes(study, OF, UNITS, [votes, 4 * votes]).tolist() == [10, 15, 65, 0]
    assert expected_votes(study, OF, UNITS, [-votes]).tolist() == [2, 3, 8, 0], "all negative: one unit's"


def _chosen(expected: float) -> Selection:
    return select(
        "simplex", votes=np.array([50, -10]), codes_of_candidates=np.zeros(2, np.int32), quotas=np.array([2]),
        expected=np.array([expected]), generator=np.random.default_rng(0),
    )  # fmt: skip


def test_a_candidate_without_votes_is_of_no_use_where_there_are_fewer_than_k() -> None:
    """Two candidates, 10 units, K = 8: 20 votes, not 80."""
    found = expected_votes(_records(), np.zeros(2, np.int32), UNITS, [np.zeros(2, np.int64)])[0]
    assert found == 20
    assert _chosen(found).chosen.tolist() == [0]
    assert _chosen(found).shortfall.tolist() == [1]
    assert sorted(_chosen(80).chosen.tolist()) == [0, 1], "twin: with K votes a unit it would seem to be"
