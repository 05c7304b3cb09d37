"""What is missing is ordered again, a bounded number of times, and a code that gives nothing is given up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from server.filters import Drops
from server.more.state import ROUNDS, Settings, State

SETTINGS = Settings(run_id="r", study_sha256="s", adapter_sha256="a", texts=1000)


def _begin(*quotas: int) -> State:
    return State.begin(SETTINGS, 1, 100, np.array(quotas))


def _play(state: State, come: Callable[[State, int, int], int]) -> list[State]:
    """All states until the end, where of ``wanted`` texts of a code only some come."""
    states = [state]
    while not states[-1].finished:
        last = states[-1]
        made = [come(last, code, int(wanted)) for code, wanted in enumerate(last.next_texts)]
        states.append(last.after(np.repeat(np.arange(len(made)), made), Drops(Counter(empty=1), cut=2)))
        assert len(states) < 1000
    return states


def test_if_all_texts_come_there_is_one_round_of_as_many_shards_as_needed() -> None:
    states = _play(_begin(700, 300, 0), lambda _state, _code, wanted: wanted)
    assert states[-1].files == (100,) * 10
    assert states[-1].made == states[-1].quotas
    assert states[-1].given_up == ()
    assert (states[-1].dropped, states[-1].cut) == ({"empty": 10}, 20)
    assert len({state.place for state in states[:-1]}) == 10


def test_texts_that_fail_by_bad_luck_are_ordered_again() -> None:
    states = _play(_begin(700, 300, 0), lambda state, code, wanted: wanted - (state.round == 0 and code == 0))
    assert states[-1].made == states[-1].quotas
    assert states[-1].round == 1
    assert len({state.place for state in states[:-1]}) == 11


def test_a_code_that_gives_hardly_anything_is_given_up_after_one_shard_and_others_go_on() -> None:
    states = _play(_begin(700, 300), lambda _state, code, wanted: wanted if code else min(wanted, 3))
    assert states[-1].given_up == (0,)
    assert states[-1].made == (3, 300)


def test_a_few_failing_texts_are_no_reason_to_give_up_a_code() -> None:
    def come(state: State, code: int, wanted: int) -> int:
        return wanted if code or state.shard % 2 or state.round else 0

    states = _play(_begin(40, 960), come)
    assert states[-1].given_up == ()
    assert states[1].made[0] == 0
    assert states[-1].made == states[-1].quotas


def test_it_ends_where_nothing_comes() -> None:
    states = _play(_begin(5, 3), lambda *_: 0)
    assert len(states) - 1 == ROUNDS
    assert states[-1].files == ()
    states = _play(_begin(*[1] * 500), lambda *_: 0)
    assert len(states) - 1 == ROUNDS * 5


def test_a_state_is_the_same_after_it_was_written_and_read() -> None:
    for state in _play(_begin(700, 300), lambda _state, code, wanted: wanted if code else 0):
        assert State.model_validate_json(state.model_dump_json()) == state
