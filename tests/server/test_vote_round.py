"""The vote round's window: late, lost and hostile sites, over real ClientApps and the real wire format."""

from __future__ import annotations

import json
from collections.abc import Iterable
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message
from rich.console import Console

import server.census as census
import server.strategies.profile_and_vote as vote_round
from common.client_app import app as client_app
from common.errors import QuorumError
from common.protocol import PROFILE_AND_VOTE, CandidatePool, LedgerHead, VoteRequest, pack_release, release_records
from common.site.config import Site
from common.site.ledger import Ledger
from common.site.plan import weak_plan
from common.study import Study
from server.aggregate import sum_profiles
from server.census import CAPPED, Roster, take_census
from server.progress import Progress, ProgressReader
from server.progress_view import ProgressView
from server.strategies.plausibility import Plausible, vote_bounds
from server.strategies.profile_and_vote import Ballots, ProfileAndVote
from tests.hospitals import rows, small_study, write_site
from tests.in_process import InProcessGrid

NAMES = {3: "east", 4: "west", 5: "hills"}
POOL = CandidatePool(tuple(f"Candidate {i} about parking" for i in range(24)), np.repeat(np.arange(4, dtype="i4"), 6))
HEAD = LedgerHead("a" * 32, 1, "b" * 64)
TOP = np.iinfo(np.int64).max
NO_UNITS = np.zeros(4, dtype=np.int64)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (census, vote_round):
        monkeypatch.setattr(module, "POLL_SECONDS", 0.02)


class Round:
    """Weak hospitals in a folder, the census over those that are there, and the vote round."""

    def __init__(self, folder: Path, **federation: Any) -> None:
        self.folder = folder
        self.files = {node: write_site(folder, name, "weak", rows(40, 40 * node)) for node, name in NAMES.items()}
        patient = {"expected_sites": 3, "census_seconds": 0.1, "vote_seconds": 20, **federation}
        self.study = Study.model_validate(small_study(Path("package:none"), federation=patient))
        self.progress = Progress(folder / "progress.jsonl")
        self.roster = Roster()

    def collect(self, grid: InProcessGrid) -> Ballots:
        self.roster = take_census(grid, self.study, "run", self.progress, tiers=("weak",))
        return ProfileAndVote(self.study, "run", self.roster, self.progress).collect(grid, POOL)

    @property
    def outcomes(self) -> dict[str, str]:
        return {site.name: site.outcome for site in self.roster.all}

    @property
    def events(self) -> list[dict[str, Any]]:
        return ProgressReader(self.folder / "progress.jsonl").new_events()

    def states(self, site: str) -> list[str]:
        """What the table said of a site, each state once in a row."""
        said = [e["states"][site] for e in self.events if e["event"] == "sites" and site in e["states"]]
        return [state for i, state in enumerate(said) if not i or state != said[i - 1]]


class LateGrid(InProcessGrid):
    """A node comes online when the question of the round is out for the first time; who has it is lost with it once."""

    def __init__(self, files: dict[int, Path], late: int) -> None:
        super().__init__({node: file for node, file in files.items() if node != late})
        self._late, self._context = late, InProcessGrid(files).contexts[late]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        if self._late not in self.contexts and any(m.metadata.message_type == PROFILE_AND_VOTE for m in messages):
            self.contexts[self._late] = self._context
            self._offline[min(self.contexts)] = 1
        return super().push_messages(messages)


def test_a_site_that_was_offline_at_the_census_is_counted_when_it_shows_up(tmp_path: Path) -> None:
    round_ = Round(tmp_path)
    ballots = round_.collect(LateGrid(round_.files, late=4))
    assert set(ballots.ballots) == set(ballots.profiles) == {"east", "west", "hills"}
    assert set(round_.outcomes.values()) == {"answered"}
    assert "weak site west has joined" in [e.get("text") for e in round_.events]
    with Ledger.of(Site.load(round_.files[4])) as ledger:
        assert 0 < ledger.spent()[0] <= 8.0


def test_without_the_welcome_it_would_not_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twin."""
    monkeypatch.setattr(ProfileAndVote, "_take_in_newcomers", lambda *_: None)
    round_ = Round(tmp_path)
    assert set(round_.collect(LateGrid(round_.files, late=4)).ballots) == {"east", "hills"}


def test_a_newcomer_that_keeps_silent_does_not_hold_the_window_open(tmp_path: Path) -> None:
    waits: list[float] = []

    class Silent(LateGrid):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
            waits.append(timeout or np.inf)
            messages = [m for m in messages if m.metadata.dst_node_id != self._late]
            return super().send_and_receive(messages, timeout=timeout)

    round_ = Round(tmp_path, vote_seconds=5)
    assert set(round_.collect(Silent(round_.files, late=4)).ballots) == {"east", "hills"}
    assert waits[-1] <= 5


def _lost_after_answering(round_: Round, node: int, times: int, *, run_ids: bool = True) -> tuple[Any, list[Any]]:
    """A grid that loses a node's first answers on the way back, and the bytes that the site made."""
    made: list[bytes] = []

    def answer(message: Message, context: Context) -> Message:
        if message.metadata.message_type != PROFILE_AND_VOTE or context.node_id != node:
            return client_app(message, context)
        if not run_ids:
            message.content["request"]["run-id"] = f"run-{len(made)}"
        reply = client_app(message, context)
        made.append(reply.content["release"]["bytes"].data if reply.has_content() else b"refused")
        if len(made) <= times:
            grid._offline[node] = 1
            return grid._reply(message)
        return reply

    grid = InProcessGrid(round_.files, answer=answer)
    return grid, made


def test_a_lost_connection_gets_the_same_question_again_and_gives_the_same_bytes(tmp_path: Path) -> None:
    round_ = Round(tmp_path)
    grid, made = _lost_after_answering(round_, 3, times=2)
    ballots = round_.collect(grid)
    asked = [m for m in grid.sent if m.metadata.message_type == PROFILE_AND_VOTE and m.metadata.dst_node_id == 3]
    digests = {VoteRequest.from_records(m.content).digest for m in asked}
    assert (len(asked), len(digests), len(set(made))) == (3, 1, 1)
    assert set(ballots.ballots) == {"east", "west", "hills"}
    with Ledger.of(Site.load(round_.files[3])) as ledger:
        assert ledger.spent()[0] <= 8.0
    assert round_.states("east") == ["FLOWER_ERROR_5, lost 1 time", "FLOWER_ERROR_5, lost 2 times",
                                     "answered, lost 2 times"]  # fmt: skip


def test_under_another_name_every_try_would_be_another_release(tmp_path: Path) -> None:
    """Twin."""
    round_ = Round(tmp_path)
    grid, made = _lost_after_answering(round_, 3, times=1, run_ids=False)
    round_.collect(grid)
    assert len(set(made)) == 2


def test_a_site_that_is_lost_every_time_is_given_up_and_named(tmp_path: Path) -> None:
    round_ = Round(tmp_path)
    grid, made = _lost_after_answering(round_, 3, times=99)
    assert set(round_.collect(grid).ballots) == {"west", "hills"}
    assert len(made) == vote_round.MAX_TRIES
    assert round_.outcomes["east"] == "FLOWER_ERROR_5"


def _hostile(round_: Round, profile: np.ndarray, ballot: np.ndarray) -> InProcessGrid:
    def answer(message: Message, context: Context) -> Message:
        if message.metadata.message_type == PROFILE_AND_VOTE and context.node_id == 4:
            return Message(
                release_records(pack_release({"profile": profile, "ballot": ballot}), HEAD), reply_to=message
            )
        return client_app(message, context)

    return InProcessGrid(round_.files, answer=answer)


STUFFED = {
    "all the largest": (np.full(4, TOP), np.full(24, TOP)),
    "all the smallest": (np.full(4, -TOP - 1), np.full(24, -TOP - 1)),
    "no units and all votes": (NO_UNITS, np.full(24, TOP)),
    "one vote too large": (NO_UNITS, np.eye(1, 24, dtype=np.int64)[0] * TOP),
    "large and small in turn": (NO_UNITS, np.tile([TOP, -TOP], 12)),
}


def _moved(round_: Round, ballots: Ballots) -> tuple[np.ndarray, Any]:
    """How far the hostile site moves each code's votes, and its public cap."""
    others = [ballots.ballots[name] for name in ("east", "hills")]
    moved = sum_profiles([*others, ballots.ballots["west"]]) - sum_profiles(others)
    bounds = vote_bounds(round_.study, weak_plan(round_.study), POOL.codes, ballots.profiles["west"])
    return moved.reshape(4, 6).sum(axis=1), bounds


@pytest.mark.parametrize("kind", STUFFED)
def test_a_hostile_answer_is_named_and_moves_others_by_no_more_than_its_cap(tmp_path: Path, kind: str) -> None:
    round_ = Round(tmp_path, max_units=200)
    ballots = round_.collect(_hostile(round_, *STUFFED[kind]))
    assert round_.outcomes == {"east": "answered", "west": CAPPED, "hills": "answered"}
    assert f"weak site west: {CAPPED}" in [e.get("text") for e in round_.events]
    assert round_.states("west")[-1] == CAPPED
    moved, bounds = _moved(round_, ballots)
    assert (np.minimum(bounds.least_sums, -6) <= moved).all()
    assert (moved <= bounds.most_sums).all()
    assert moved.sum() <= bounds.most_total
    assert ballots.profiles["west"].max() < 300, "max_units and noise"


def test_without_the_cap_it_moves_them_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twin."""
    monkeypatch.setattr(vote_round, "plausible", lambda _s, _p, _c, profile, ballot: Plausible(profile, ballot, False))
    round_ = Round(tmp_path, max_units=200)
    ballots = round_.collect(_hostile(round_, NO_UNITS, np.full(24, 10**6)))
    moved, bounds = _moved(round_, ballots)
    assert (moved > bounds.most_sums).all()
    assert round_.outcomes["west"] == "answered"


@pytest.mark.parametrize(
    ("profile", "ballot"),
    [
        (NO_UNITS, np.zeros(23, np.int64)),
        (NO_UNITS[:3], np.zeros(24, np.int64)),
        (NO_UNITS, np.full(24, np.nan)),
        (NO_UNITS, np.full(24, np.inf, np.float32)),
        (NO_UNITS, np.zeros((24, 1), np.int64)),
    ],
)
def test_an_answer_of_the_wrong_form_is_dropped_and_the_site_named(
    tmp_path: Path, profile: np.ndarray, ballot: np.ndarray
) -> None:
    round_ = Round(tmp_path)
    ballots = round_.collect(_hostile(round_, profile, ballot))
    assert set(ballots.ballots) == set(ballots.profiles) == {"east", "hills"}
    assert round_.outcomes["west"] == "malformed ballot"
    assert round_.states("west")[-1] == "malformed ballot"


def test_without_a_quorum_the_round_ends_and_says_who_was_missing_and_why(tmp_path: Path) -> None:
    round_ = Round(tmp_path, expected_sites=4, min_weak=3, vote_seconds=1)
    Site.load(round_.files[3]).documents.path.write_bytes(b"damaged")
    said = r"vote round: 2 weak sites answered, the study needs 3: east \(DATA_UNUSABLE\), hills \(answered\), west"
    with pytest.raises(QuorumError, match=said):
        round_.collect(InProcessGrid(round_.files))
    assert round_.states("east")[-1] == "DATA_UNUSABLE"


def test_the_window_closes_at_its_deadline_with_whoever_answered(tmp_path: Path) -> None:
    round_ = Round(tmp_path, vote_seconds=1)
    ballots = round_.collect(InProcessGrid(round_.files, silent={PROFILE_AND_VOTE: 5}))
    assert set(ballots.ballots) == {"east", "west"}
    assert round_.states("hills") == ["asked", "no answer in time"]


def _shown(events: Iterable[dict[str, Any]], *, terminal: bool) -> str:
    out = StringIO()
    with ProgressView(Console(file=out, force_terminal=terminal, width=100)) as view:
        for event in events:
            view.show(event)
    return out.getvalue()


EVENTS = [
    {"event": "phase", "phase": "votes", "total": 2},
    {"event": "sites", "phase": "votes", "states": {"east": "asked", "[red]x": "not there yet"}},
    {"event": "step", "phase": "votes", "done": 0, "total": 2},
    {"event": "sites", "phase": "votes", "states": {"east": "answered", "[red]x": "not there yet"}},
]


def test_elsewhere_than_on_a_terminal_every_change_is_a_line() -> None:
    lines = [line.strip() for line in _shown(EVENTS, terminal=False).splitlines()]
    assert lines[1:] == ["east: asked", "[red]x: not there yet", "east: answered"]


def test_on_a_terminal_the_table_stands_below_the_bars_until_the_phase_is_done() -> None:
    assert "answered" in _shown(EVENTS, terminal=True)
    assert "[red]x" in _shown(EVENTS, terminal=True)
    view = ProgressView(Console(file=StringIO(), force_terminal=True))
    for event in [*EVENTS, {"event": "phase-done", "phase": "votes", "seconds": 1.0}]:
        view.show(event)
    assert not view._bars.states


def test_a_state_that_has_not_changed_is_not_written_again(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "progress.jsonl")
    for state in ("asked", "asked", "answered"):
        progress.sites("votes", {"east": state})
    assert [json.loads(line)["states"] for line in (tmp_path / "progress.jsonl").read_text().splitlines()] == [
        {"east": "asked"},
        {"east": "answered"},
    ]
