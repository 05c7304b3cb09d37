"""The door: one charge, one answer, nothing but noised values, whatever is asked and whenever the site is killed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import (
    AwaitingApprovalError,
    BudgetExceededError,
    ConflictError,
    DataError,
    LedgerError,
    LedgerRestoredError,
    PolicyRefusal,
    WireCode,
    WrongTierError,
)
from common.privacy.accounting import describe, described, joint_epsilon
from common.privacy.noise import discrete_gaussian
from common.privacy.values import ExactCounts
from common.protocol import CandidatePool, CensusRequest, LedgerHead, TrainRequest, VoteReply, VoteRequest
from common.site import check
from common.site.config import Site
from common.site.door import Answer, Compute, Door, Release, Task
from common.site.ledger import Ledger
from common.site.plan import strong_plan
from common.study import Study

STUDY = Study.model_validate(
    {
        "name": "door",
        "codes": {"attributes": [{"name": "topic", "values": ["a", "b"]}]},
        "privacy": {"epsilon": 4.0, "delta": 1e-4},
        "generator": {"base": "package:none"},
        "training": {"rounds": 3, "batch_size": 10, "steps": 1},
        "federation": {"min_documents": 20},
    }
)


def _site(folder: Path, tier: str = "weak", **policy: Any) -> Site:
    return Site.model_validate(
        {
            "name": "hospital",
            "tier": tier,
            "size_class": 20,
            "state": folder / "state",
            "documents": {"path": folder / "documents.csv"},
            "policy": {"max_epsilon": 9.0, "max_delta": 1e-3, **policy},
        }
    )


def _vote(run: str = "run", texts: Sequence[str] = ("x", "y")) -> VoteRequest:
    return VoteRequest(STUDY, run, CandidatePool(tuple(texts), np.array([0, 1], np.int32)))


def _train(round_: int, run: str = "run") -> TrainRequest:
    return TrainRequest(STUDY, run, round_, {"b": np.zeros(2, np.float32)}, "digest")


class Computer:
    """Stands in for a tier; notes what it was asked to compute."""

    def __init__(self, *, keeps: bool = False) -> None:
        self.calls: list[Sequence[str]] = []
        self.tasks: list[Task] = []
        self.keeps = keeps

    def __call__(self) -> Compute:
        return self._compute

    def _compute(self, task: Task) -> Answer:
        self.calls.append(tuple(task.parts))
        self.tasks.append(task)
        counts = ExactCounts(np.array([100, 200]), 1)
        return Answer(
            {"profile": discrete_gaussian(counts, 3.0), "ballot": discrete_gaussian(counts, 3.0)},
            {"moments": discrete_gaussian(counts, 3.0)} if self.keeps else {},
        )


def _bytes(release: Release) -> bytes:
    return release.to_records()["release"]["bytes"].numpy().tobytes()


def test_a_repeated_request_gets_the_same_bytes_and_no_new_charge(tmp_path: Path) -> None:
    door, compute = Door(_site(tmp_path)), Computer()
    answers = {_bytes(door.release(_vote(), compute)) for _ in range(100)}
    assert len(answers) == 1
    assert len(compute.calls) == 1
    spent = Ledger(_site(tmp_path).ledger_path).spent()
    assert 3.9 < spent[0] <= 4.0
    assert spent[1] == 1e-4


def test_computing_again_would_have_given_other_bytes(tmp_path: Path) -> None:
    """Twin: without the ledger's memory, averaging repeats would remove the noise."""
    answers = {_bytes(Door(_site(tmp_path / str(i))).release(_vote(), Computer())) for i in range(5)}
    assert len(answers) > 1


def test_a_changed_question_under_an_old_id_is_refused(tmp_path: Path) -> None:
    door = Door(_site(tmp_path))
    door.release(_vote(), Computer())
    with pytest.raises(ConflictError):
        door.release(_vote(texts=("x", "z")), Computer())


def test_the_cap_holds_over_runs(tmp_path: Path) -> None:
    door, compute = Door(_site(tmp_path)), Computer()
    door.release(_vote("one"), compute)
    door.release(_vote("two"), compute)
    with pytest.raises(BudgetExceededError, match="lifetime caps are 9"):
        door.release(_vote("three"), compute)
    assert len(compute.calls) == 2, "nothing was computed for the refused run"


def test_a_strong_site_gives_its_profile_once_with_its_first_answer(tmp_path: Path) -> None:
    door, compute = Door(_site(tmp_path, "strong")), Computer()
    for round_ in (2, 3, 2):
        door.release(_train(round_), compute)
    assert compute.calls == [("train/2", "profile"), ("train/3",)]


def test_what_an_answer_kept_is_there_for_the_next_one_and_for_a_second_try_of_it(tmp_path: Path) -> None:
    site, compute = _site(tmp_path, "strong"), Computer(keeps=True)
    Door(site).release(_train(1), compute)

    def fail(task: Task) -> Answer:
        compute.tasks.append(task)
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        Door(site).release(_train(2), lambda: fail)
    Door(site).release(_train(2), compute)
    Door(site).release(_train(2), compute)
    Door(site).release(_train(3, "another run"), compute)
    first, tried, second, other = compute.tasks
    assert not first.kept
    assert not other.kept, "a run's moments are its own"
    np.testing.assert_array_equal(tried.kept["moments"], second.kept["moments"])


def test_the_newest_answer_replaces_what_was_kept(tmp_path: Path) -> None:
    site, compute = _site(tmp_path, "strong"), Computer(keeps=True)
    for round_ in (1, 2, 3):
        Door(site).release(_train(round_), compute)
    with Ledger.of(site) as ledger:
        assert ledger._journal._all("SELECT COUNT(*) FROM kept") == [(1,)]
    assert not np.array_equal(compute.tasks[1].kept["moments"], compute.tasks[2].kept["moments"])


@pytest.mark.parametrize("statement", ["DELETE FROM kept", "UPDATE kept SET bytes = x'00'"])
def test_what_was_kept_may_not_be_changed(tmp_path: Path, statement: str) -> None:
    site, compute = _site(tmp_path, "strong"), Computer(keeps=True)
    Door(site).release(_train(1), compute)
    with Ledger.of(site) as ledger:
        ledger._journal._database.execute(statement)
    with pytest.raises(LedgerError, match="kept was changed"):
        Door(site).release(_train(2), compute)


def test_only_noised_values_are_kept(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="only Noised values"):
        Door(_site(tmp_path)).release(_vote(), lambda: lambda _: Answer({}, {"sum": np.ones(3)}))


def test_a_site_that_joins_late_is_charged_for_the_rounds_that_are_left(tmp_path: Path) -> None:
    site, compute = _site(tmp_path, "strong"), Computer()
    Door(site).release(_train(3), compute)
    whole = strong_plan(STUDY, 20)
    with Ledger.of(site) as ledger:
        charged, (epsilon, _) = ledger.reservation("hospital", STUDY.sha256, "run"), ledger.spent()
    assert charged["parts"] == ["profile", "train/3"]
    assert charged["mechanisms"][0] == describe(replace(whole.training, steps=1)), "its noise is the study's"
    assert epsilon == joint_epsilon([described(m) for m in charged["mechanisms"]], STUDY.privacy.delta)
    assert epsilon < 0.8 * whole.epsilon
    with pytest.raises(WrongTierError, match=r"in this run it releases \['profile', 'train/3'\]"):
        Door(site).release(_train(2), compute)
    assert len(compute.calls) == 1


def test_a_site_that_was_there_is_charged_for_all_rounds(tmp_path: Path) -> None:
    """Twin: what is left from round 1 on is everything."""
    site = _site(tmp_path, "strong")
    Door(site).release(_train(1), Computer())
    assert Ledger(site.ledger_path).spent()[0] == strong_plan(STUDY, 20).epsilon


def test_a_closed_run_gets_nothing_new_and_counts_in_the_renyi_filter_for_what_it_got(tmp_path: Path) -> None:
    site, compute = _site(tmp_path, "strong"), Computer()
    stored = _bytes(Door(site).release(_train(1), compute))
    whole = strong_plan(STUDY, 20)
    with Ledger.of(site) as ledger:
        before = ledger.charges(())
        ledger.close_run("hospital", STUDY.sha256, "run", "dpo")
        after = ledger.charges(())
    assert before[0].mechanisms == whole.mechanisms
    assert after[0].mechanisms == (replace(whole.training, steps=1), whole.profile)
    assert after[0].epsilon == before[0].epsilon, "when it was closed may depend on what was given out"
    with pytest.raises(PolicyRefusal, match="has closed run 'run'"):
        Door(site).release(_train(2), compute)
    assert _bytes(Door(site).release(_train(1), compute)) == stored


def test_a_run_that_was_never_charged_cannot_be_closed(tmp_path: Path) -> None:
    with Ledger.of(_site(tmp_path)) as ledger, pytest.raises(LedgerError, match="never charged"):
        ledger.close_run("hospital", STUDY.sha256, "run", "dpo")


def test_the_whole_plan_is_charged_before_the_first_release(tmp_path: Path) -> None:
    site = _site(tmp_path, "strong")
    Door(site).release(_train(1), Computer())
    first = Ledger(site.ledger_path).spent()
    Door(site).release(_train(2), Computer())
    assert Ledger(site.ledger_path).spent() == first


@pytest.mark.parametrize("tier", ["weak", "strong"])
def test_a_tier_answers_its_own_requests_only(tmp_path: Path, tier: str) -> None:
    wrong = _train(1) if tier == "weak" else _vote()
    compute = Computer()
    with pytest.raises(WrongTierError):
        Door(_site(tmp_path, tier)).release(wrong, compute)
    assert not compute.calls


@pytest.mark.parametrize(
    ("policy", "code"),
    [
        ({"allowed_studies": ["0" * 64]}, WireCode.REFUSED_BY_POLICY),
        ({"allowed_units": ["patient"]}, WireCode.REFUSED_BY_POLICY),
        ({"max_epsilon_per_study": 3.9}, WireCode.BUDGET_EXCEEDED),
        ({"max_epsilon": 3.9}, WireCode.BUDGET_EXCEEDED),
        ({"max_delta": 1e-5}, WireCode.BUDGET_EXCEEDED),
        ({"max_delta_per_study": 1e-5}, WireCode.BUDGET_EXCEEDED),
        ({"min_documents": 21}, WireCode.REFUSED_BY_POLICY),
        ({"allowed_studies": "ask"}, WireCode.AWAITING_APPROVAL),
    ],
)
def test_policy_refuses_before_anything_is_computed_or_charged(
    tmp_path: Path, policy: dict[str, Any], code: WireCode
) -> None:
    site, compute = _site(tmp_path, **policy), Computer()
    with pytest.raises(PolicyRefusal):
        Door(site).release(_vote(), compute)
    assert not compute.calls
    assert Ledger.of(site).spent() == (0, 0)
    assert Door(site).census(CensusRequest(STUDY, "run")).refusal == code


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ({"allowed_requests": ["train"]}, "'profile-and-vote' was asked"),
        ({"max_candidates": 1}, "2 candidates"),
        ({"max_request_bytes": 1}, "2 bytes"),
        ({"min_candidates_per_code": 2}, "1 candidates under code 'topic=a'"),
    ],
)
def test_policy_refuses_a_request_that_is_too_much(tmp_path: Path, policy: dict[str, Any], said: str) -> None:
    site, compute = _site(tmp_path, **policy), Computer()
    with pytest.raises(PolicyRefusal, match=said):
        Door(site).release(_vote(), compute)
    assert not compute.calls
    assert Ledger.of(site).spent() == (0, 0)


def test_a_candidate_longer_than_the_policy_allows_is_refused(tmp_path: Path) -> None:
    site, compute = _site(tmp_path, max_candidate_characters=4), Computer()
    with pytest.raises(PolicyRefusal, match=r"a candidate of the pool has 5 characters; .* allows 4"):
        Door(site).release(_vote(texts=("four", "fives")), compute)
    assert not compute.calls
    Door(site).release(_vote(texts=("four", "4")), compute)


def test_an_adapter_larger_than_the_policy_allows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyRefusal, match="8 bytes"):
        Door(_site(tmp_path, "strong", max_request_bytes=7)).release(_train(1), Computer())


def test_what_fails_before_computing_is_charged_nothing(tmp_path: Path) -> None:
    def unreadable() -> Compute:
        raise DataError("documents.csv: no such file")

    site = _site(tmp_path)
    with pytest.raises(DataError):
        Door(site).release(_vote(), unreadable)
    assert Ledger.of(site).spent() == (0, 0)


def test_a_study_waits_for_a_person_and_the_last_word_counts(tmp_path: Path) -> None:
    site, compute = _site(tmp_path, allowed_studies="ask"), Computer()
    with pytest.raises(AwaitingApprovalError, match="site approve"):
        Door(site).release(_vote(), compute)
    with Ledger.of(site) as ledger:
        assert ledger.pending("hospital") == [STUDY]
        ledger.decide("hospital", STUDY.sha256, "declined", "Dr Who")
        assert ledger.pending("hospital") == []
    with pytest.raises(AwaitingApprovalError):
        Door(site).release(_vote(), compute)
    with Ledger.of(site) as ledger:
        ledger.decide("hospital", STUDY.sha256, "approved", "Dr Who")
    Door(site).release(_vote(), compute)
    assert len(compute.calls) == 1


def test_waiting_studies_cannot_fill_the_disk(tmp_path: Path) -> None:
    site = _site(tmp_path, allowed_studies="ask")
    with Ledger.of(site) as ledger:
        for i in range(110):
            ledger.ask("hospital", STUDY.model_copy(update={"name": f"study{i}"}))
        assert len(ledger.pending("hospital")) == 100


@pytest.mark.parametrize(("composition", "runs"), [("basic", 9), ("renyi", 60)])
def test_many_small_studies_fit_a_renyi_filter_better(tmp_path: Path, composition: str, runs: int) -> None:
    small = STUDY.model_copy(update={"privacy": STUDY.privacy.model_copy(update={"epsilon": 1.0, "delta": 1e-5})})
    site = _site(tmp_path, composition=composition)
    for run in range(runs):
        Door(site).release(VoteRequest(small, f"run{run}", _vote().pool), Computer())
    with pytest.raises(BudgetExceededError, match="lifetime caps are 9"):
        Door(site).release(VoteRequest(small, "one more", _vote().pool), Computer())


def test_overlapping_data_share_a_budget_and_others_do_not(tmp_path: Path) -> None:
    def site(name: str, *assets: str) -> Site:
        plain = _site(tmp_path, max_epsilon=4.5)
        documents = plain.documents.model_copy(update={"assets": assets})
        return plain.model_copy(update={"name": name, "documents": documents})

    Door(site("one", "letters", "notes")).release(_vote(), Computer())
    Door(site("two", "scans")).release(_vote(), Computer())
    for sharing in (site("three", "notes"), site("four")):
        with pytest.raises(BudgetExceededError):
            Door(sharing).release(_vote(), Computer())


def test_an_older_copy_of_the_ledger_or_another_one_is_refused(tmp_path: Path) -> None:
    site, compute = _site(tmp_path), Computer()
    with Ledger.of(site) as ledger:
        opened = ledger.head()
    Door(site).release(_vote(), compute)
    with Ledger.of(site) as ledger:
        now = ledger.head()
    for seen in (opened, now):
        again = VoteRequest(STUDY, "run", _vote().pool, seen)
        assert _bytes(Door(site).release(again, compute)) == _bytes(Door(site).release(_vote(), compute))
    for seen in (
        replace(now, sequence=now.sequence + 1),
        replace(now, hash="0" * 64),
        replace(opened, hash="0" * 64),
        replace(now, ledger="0" * 32),
    ):
        with pytest.raises(LedgerRestoredError):
            Door(site).release(VoteRequest(STUDY, "other", _vote().pool, seen), compute)
        assert Door(site).census(CensusRequest(STUDY, "run", seen)).refusal == WireCode.LEDGER_RESTORED
    assert len(compute.calls) == 1


def test_ten_thousand_repeats_are_the_same_bytes_and_one_charge(tmp_path: Path) -> None:
    door, compute = Door(_site(tmp_path)), Computer()
    request = _vote()
    answers = {_bytes(door.release(request, compute)) for _ in range(10_000)}
    assert (len(answers), len(compute.calls)) == (1, 1)
    exported = Ledger.of(_site(tmp_path)).export("hospital")
    assert [event["kind"] for event in exported["events"]] == ["opened", "reservation", "release"]


def test_only_noised_values_pass(tmp_path: Path) -> None:
    site = _site(tmp_path)
    for smuggled in (np.array([100, 200]), ExactCounts(np.array([100, 200]), 1), [100], "text"):
        with pytest.raises(LedgerError, match="only Noised values"):
            Door(site).release(_vote(), lambda s=smuggled: lambda _: Answer({"profile": s}))
    assert Ledger.of(site).stored("hospital", STUDY.sha256, "run", "profile-and-vote", _vote().digest) is None


def test_a_release_is_made_by_the_door_only() -> None:
    with pytest.raises(PolicyRefusal, match="only Door"):
        Release(b"exact", LedgerHead("a", 1, "b"), door=object())


def test_a_failed_computation_is_charged_once_and_can_be_asked_again(tmp_path: Path) -> None:
    site = _site(tmp_path)

    def fail(_: Task) -> Answer:
        raise RuntimeError("disk")

    with pytest.raises(RuntimeError):
        Door(site).release(_vote(), lambda: fail)
    charged = Ledger(site.ledger_path).spent()
    Door(site).release(_vote(), Computer())
    assert Ledger(site.ledger_path).spent() == charged


def test_an_unreadable_ledger_releases_nothing(tmp_path: Path) -> None:
    site = _site(tmp_path)
    site.state.mkdir(parents=True)
    site.ledger_path.write_bytes(b"this is not a database, but it is long enough to be taken for one" * 20)
    compute = Computer()
    with pytest.raises(LedgerError):
        Door(site).release(_vote(), compute)
    assert not compute.calls


def test_the_ledger_holds_noised_bytes_only_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    site = _site(tmp_path)
    release = Door(site).release(_vote(), Computer())
    reply = VoteReply.from_records(release.to_records(), 2, 2)
    assert not np.array_equal(reply.profile, [100, 200]) or not np.array_equal(reply.ballot, [100, 200])
    assert site.ledger_path.stat().st_mode & 0o077 == 0


def test_a_strong_site_without_its_libraries_says_so_at_the_census(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = _site(tmp_path, "strong")
    assert Door(site).census(CensusRequest(STUDY, "run")).refusal is None
    monkeypatch.setattr(check, "STRONG_LIBRARIES", ("no_such_library",))
    assert Door(site).census(CensusRequest(STUDY, "run")).refusal == WireCode.MISSING_EXTRA


def test_the_census_depends_on_configuration_only(tmp_path: Path) -> None:
    """There is no documents file at all, and the census doesn't mind."""
    reply = Door(_site(tmp_path)).census(CensusRequest(STUDY, "run"))
    assert (reply.name, reply.tier, reply.size_class, reply.refusal) == ("hospital", "weak", 20, None)
    assert reply.study_sha256 == STUDY.sha256
