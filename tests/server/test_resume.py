"""A run that is killed anywhere goes on, and no site is asked, or charged, for anything twice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

import server.server_app as server_app
from common.errors import CheckpointError, FederationError
from common.models.generator import Generator
from common.protocol import PROFILE_AND_VOTE, TRAIN
from common.site.config import Site
from common.site.ledger import Ledger
from server.checkpoint import Checkpoint, held, read_checkpoint, write_checkpoint
from server.corpus import read_corpus, read_pool
from server.server_app import Run, open_run, reopen_run, run_study
from server.strategies.lora_dp_fedavg import LoraDpFedAvg
from server.strategies.profile_and_vote import ProfileAndVote
from server.summary import Summary, read_summary
from server.verify import read_exports, verify
from server.workspace import Workspace
from tests.hospitals import rows, small_study, write_site, write_study
from tests.in_process import InProcessGrid

TIERS = {1: ("north", "strong"), 2: ("south", "strong"), 3: ("east", "weak"), 4: ("west", "weak")}
ROUNDS = 3


class Killed(BaseException):
    """What no handler in the program catches."""


class _Hospitals:
    """Four hospitals and a study in a folder, and how their run is begun and gone on with."""

    def __init__(self, folder: Path, base: Path, **changes: Any) -> None:
        self.folder = folder
        self.files = {n: write_site(folder, name, tier, rows(40, 40 * n)) for n, (name, tier) in TIERS.items()}
        training = {"rounds": ROUNDS, "steps": 1, **changes.pop("training", {})}
        self.study = write_study(folder, small_study(base, training=training, **changes))

    def grid(self, offset: int = 0, kind: type[InProcessGrid] = InProcessGrid, **options: Any) -> InProcessGrid:
        """Nodes get other numbers in every attempt, as a new SuperLink gives them."""
        return kind({node + offset: file for node, file in self.files.items()}, **options)

    def open(self) -> Run:
        return open_run(str(self.study), str(self.folder / "run"), str(self.folder / "state"))

    def reopen(self) -> Run:
        return reopen_run("", str(self.folder / "run"), str(self.folder / "state"))

    def exports(self) -> Path:
        folder = self.folder / "exports"
        folder.mkdir(exist_ok=True)
        for file in self.files.values():
            site = Site.load(file)
            if site.ledger_path.exists():
                with Ledger.of(site) as ledger:
                    (folder / f"{site.name}.json").write_text(json.dumps(ledger.export(site.name)))
        return folder

    def events(self, name: str) -> list[dict[str, Any]]:
        return list(json.loads((self.exports() / f"{name}.json").read_text())["events"])


def _assert_whole(hospitals: _Hospitals) -> Summary:
    """Every site was charged once and answered every question once; the claim holds; the corpus is there."""
    workspace = Workspace(hospitals.folder / "run")
    summary = read_summary(workspace)
    for name, tier in TIERS.values():
        kinds = Counter(event["kind"] for event in hospitals.events(name))
        assert kinds["reservation"] == 1
        keys = [e["content"]["key"] for e in hospitals.events(name) if e["kind"] == "release"]
        expected = [f"train/{r}" for r in range(1, ROUNDS + 1)] if tier == "strong" else ["profile-and-vote"]
        assert keys == expected
    assert {site.name: site.answers for site in summary.sites} == {"north": 3, "south": 3, "east": 1, "west": 1}
    verification = verify(workspace.root, read_exports([hospitals.exports()]))
    assert verification.holds, verification
    assert [report.round for report in summary.rounds] == [1, 2, 3]
    texts = read_corpus(workspace, reopened_codes(workspace))
    assert len(texts) == summary.corpus_size == 20
    assert len({text.text for text in texts}) == 20, "texts of a pool that was read back aren't made again"
    return summary


def reopened_codes(workspace: Workspace) -> Any:
    from common.study import Study

    return Study.from_canonical(workspace.study.read_text()).codes


def _kill_after(patch: pytest.MonkeyPatch, owner: Any, name: str, call: int, *, before: bool) -> None:
    """Die at the ``call``-th call of a function, before it does its work or right after."""
    real, calls = getattr(owner, name), Counter[str]()

    def dying(*arguments: Any, **options: Any) -> Any:
        calls[name] += 1
        if before and calls[name] == call:
            raise Killed
        result = real(*arguments, **options)
        if calls[name] == call:
            raise Killed
        return result

    patch.setattr(owner, name, dying)


POINTS: dict[str, tuple[Any, str, int]] = {
    "model": (server_app, "check_fits", 1),
    "census": (server_app, "take_census", 1),
    "checkpoint before training": (server_app, "write_checkpoint", 1),
    "first round asked": (LoraDpFedAvg, "configure_train", 1),
    "first round aggregated": (LoraDpFedAvg, "aggregate_train", 1),
    "checkpoint of the first round": (server_app, "write_checkpoint", 2),
    "adapter of the first round": (server_app, "replace_folder", 1),
    "second round aggregated": (LoraDpFedAvg, "aggregate_train", 2),
    "checkpoint of the last round": (server_app, "write_checkpoint", 4),
    "pool": (server_app, "write_pool", 1),
    "votes": (ProfileAndVote, "collect", 1),
    "profiles": (server_app, "write_profiles", 1),
    "ballots": (server_app, "write_ballots", 1),
    "checkpoint after the votes": (server_app, "write_checkpoint", 5),
    "corpus": (server_app, "write_corpus", 1),
    "summary": (server_app, "summarise", 1),
}


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("point", POINTS)
def test_a_run_that_is_killed_goes_on_and_nothing_is_charged_twice(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, point: str, before: bool
) -> None:
    hospitals = _Hospitals(tmp_path, tiny_model)
    with monkeypatch.context() as patch:
        owner, name, call = POINTS[point]
        _kill_after(patch, owner, name, call, before=before)
        with pytest.raises(Killed):
            run_study(hospitals.grid(), hospitals.open())
    workspace = Workspace(tmp_path / "run")
    kept = workspace.pool.read_bytes() if workspace.pool.exists() else None
    run_study(hospitals.grid(10), hospitals.reopen())
    _assert_whole(hospitals)
    if kept is not None:
        assert workspace.pool.read_bytes() == kept, "sites vote on one pool"


class _DyingGrid(InProcessGrid):
    """The coordinator dies while a round is under way: after the ``fatal``-th message of a kind was answered."""

    fatal: tuple[str, int] = ("", 0)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            ids += list(super().push_messages([message]))
            asked = Counter(m.metadata.message_type for m in self.sent)
            if asked[self.fatal[0]] == self.fatal[1]:
                raise Killed
        return ids


@pytest.mark.parametrize("fatal", [(TRAIN, 1), (TRAIN, 3), (TRAIN, 4), (PROFILE_AND_VOTE, 1)], ids=str)
@pytest.mark.parametrize("lora", ["ffa", "alternating"])
def test_a_round_that_was_broken_off_is_asked_again_with_the_same_adapter(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, fatal: tuple[str, int], lora: str
) -> None:
    hospitals = _Hospitals(
        tmp_path, tiny_model, generator={"lora": lora}, training={"server": {"optimizer": "fedavgm"}}
    )
    monkeypatch.setattr(_DyingGrid, "fatal", fatal)
    first = hospitals.grid(kind=_DyingGrid)
    with pytest.raises(Killed):
        run_study(first, hospitals.open())
    released = {
        name: {e["hash"] for e in hospitals.events(name) if e["kind"] == "release"} for name in ("north", "south")
    }
    second = hospitals.grid(10)
    run_study(second, hospitals.reopen())
    _assert_whole(hospitals)
    for name, hashes in released.items():
        assert hashes <= {e["hash"] for e in hospitals.events(name)}
    asked = {
        (m.metadata.message_type, m.metadata.group_id, m.metadata.dst_node_id % 10): _payload(m)
        for m in first.sent
        if m.metadata.message_type == fatal[0]
    }
    repeated = {
        (m.metadata.message_type, m.metadata.group_id, m.metadata.dst_node_id % 10): _payload(m) for m in second.sent
    }
    both = asked.keys() & repeated.keys()
    assert both
    assert all(asked[key] == repeated[key] for key in both)


def _payload(message: Message) -> bytes:
    arrays = message.content.array_records
    return b"".join(array.numpy().tobytes() for record in arrays.values() for array in record.values())


def test_under_another_name_the_sites_would_be_charged_again(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twin: what would happen if the run's name weren't kept."""
    hospitals = _Hospitals(tmp_path, tiny_model)
    with monkeypatch.context() as patch:
        _kill_after(patch, LoraDpFedAvg, "aggregate_train", 1, before=False)
        with pytest.raises(Killed):
            run_study(hospitals.grid(), hospitals.open())
    identity = Workspace(tmp_path / "run").identity
    identity.write_text(identity.read_text().replace(json.loads(identity.read_text())["run_id"], "ab" * 16))
    run_study(hospitals.grid(10), hospitals.reopen())
    assert Counter(event["kind"] for event in hospitals.events("north"))["reservation"] == 2


def test_a_site_that_is_gone_when_the_run_goes_on_stays_in_the_claim(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hospitals = _Hospitals(tmp_path, tiny_model)
    with monkeypatch.context() as patch:
        _kill_after(patch, server_app, "write_pool", 1, before=False)
        with pytest.raises(Killed):
            run_study(hospitals.grid(), hospitals.open())
    there = InProcessGrid({13: hospitals.files[3], 14: hospitals.files[4]})
    run_study(there, hospitals.reopen())
    sites = {site.name: site for site in read_summary(Workspace(tmp_path / "run")).sites}
    assert sites["north"].answers == ROUNDS
    assert sites["north"].epsilon is not None
    assert not [m for m in there.sent if m.metadata.message_type == TRAIN]
    assert verify(tmp_path / "run", read_exports([hospitals.exports()])).holds


def test_a_site_that_shows_up_between_rounds_joins_and_is_charged_for_what_is_left(
    tmp_path: Path, tiny_model: Path
) -> None:
    hospitals = _Hospitals(tmp_path, tiny_model, federation={"expected_sites": 3, "census_seconds": 1})

    class Late(InProcessGrid):
        """South comes online when the first training question is out."""

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            ids = super().push_messages(messages)
            if any(m.metadata.message_type == TRAIN for m in self.sent) and 2 not in self.contexts:
                other = InProcessGrid({2: hospitals.files[2]})
                self.contexts[2] = other.contexts[2]
            return ids

    grid = Late({node: file for node, file in hospitals.files.items() if node != 2})
    run_study(grid, hospitals.open())
    summary = read_summary(Workspace(tmp_path / "run"))
    assert {site.name: site.answers for site in summary.sites} == {"north": 3, "south": 2, "east": 1, "west": 1}
    (charge,) = [e["content"] for e in hospitals.events("south") if e["kind"] == "reservation"]
    (whole,) = [e["content"] for e in hospitals.events("north") if e["kind"] == "reservation"]
    assert charge["parts"] == ["profile", "train/2", "train/3"]
    assert charge["epsilon"] < 0.95 * whole["epsilon"]
    assert verify(tmp_path / "run", read_exports([hospitals.exports()])).holds
    assert [len(report.updates) for report in summary.rounds] == [1, 2, 2]


def test_a_site_that_is_back_only_later_goes_on_where_it_was(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hospitals = _Hospitals(tmp_path, tiny_model, federation={"census_seconds": 1})
    with monkeypatch.context() as patch:
        _kill_after(patch, LoraDpFedAvg, "aggregate_train", 1, before=False)
        with pytest.raises(Killed):
            run_study(hospitals.grid(), hospitals.open())

    class Late(InProcessGrid):
        """South is back when a training question is out."""

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            ids = super().push_messages(messages)
            if any(m.metadata.message_type == TRAIN for m in self.sent) and 12 not in self.contexts:
                self.contexts[12] = InProcessGrid({12: hospitals.files[2]}).contexts[12]
            return ids

    run_study(Late({node + 10: file for node, file in hospitals.files.items() if node != 2}), hospitals.reopen())
    sites = read_summary(Workspace(tmp_path / "run")).sites
    assert sorted((site.name, site.answers) for site in sites) == [
        ("east", 1), ("north", 3), ("south", 2), ("west", 1),
    ]  # fmt: skip
    assert [e["content"]["key"] for e in hospitals.events("south") if e["kind"] == "release"] == ["train/1", "train/3"]
    assert verify(tmp_path / "run", read_exports([hospitals.exports()])).holds


@pytest.mark.parametrize("aggregation", ["mean", "trimmed-mean"])
@pytest.mark.parametrize("optimizer", ["fedavg", "fedavgm", "fedadam"])
@pytest.mark.parametrize("lora", ["ffa", "plain", "alternating"])
def test_every_way_to_train_runs_and_only_what_a_round_trains_comes_back(
    tmp_path: Path, tiny_model: Path, lora: str, optimizer: str, aggregation: str
) -> None:
    rate = {"learning_rate": 0.01} if optimizer == "fedadam" else {}
    hospitals = _Hospitals(
        tmp_path,
        tiny_model,
        generator={"lora": lora},
        training={"aggregation": aggregation, "server": {"optimizer": optimizer, **rate}},
        pool={"size": 8, "max_new_tokens": 4},
        corpus={"size": 20},
    )
    run = hospitals.open()
    seen: list[Checkpoint] = []
    grid = hospitals.grid()
    initial = Generator(run.study.generator).adapter()
    with pytest.MonkeyPatch.context() as patch:
        real = server_app.write_checkpoint

        def noted(workspace: Workspace, study: Any, checkpoint: Checkpoint) -> None:
            if checkpoint.round > len(seen):
                seen.append(checkpoint)
            real(workspace, study, checkpoint)

        patch.setattr(server_app, "write_checkpoint", noted)
        run_study(grid, run)
    before = initial
    for checkpoint in seen:
        moved = {n for n in before if not np.array_equal(before[n], checkpoint.adapter[n])}
        factors = {"ffa": ["lora_B"], "plain": ["lora_A", "lora_B"]}.get(
            lora, ["lora_B"] if checkpoint.round % 2 else ["lora_A"]
        )
        assert moved == {n for n in before if any(f in n for f in factors)}
        before = checkpoint.adapter
    assert len(seen) == ROUNDS


# Bad input


def _finished(hospitals: _Hospitals) -> None:
    (hospitals.folder / "run" / "summary.json").write_text("{}")


def _truncated(hospitals: _Hospitals) -> None:
    file = hospitals.folder / "run" / "checkpoint.npz"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _of_another_study(hospitals: _Hospitals) -> None:
    run = hospitals.reopen()
    other = run.study.model_copy(update={"name": "other"})
    write_checkpoint(run.workspace, other, run.start)


def _of_another_adapter(hospitals: _Hospitals) -> None:
    run = hospitals.reopen()
    wrong = {name: value[:, :1] for name, value in run.start.adapter.items()}
    write_checkpoint(run.workspace, run.study, Checkpoint(round=1, adapter=wrong))


def _of_a_later_round(hospitals: _Hospitals) -> None:
    run = hospitals.reopen()
    write_checkpoint(run.workspace, run.study, Checkpoint(round=7, adapter=run.start.adapter))


def _garbage(hospitals: _Hospitals) -> None:
    (hospitals.folder / "run" / "checkpoint.npz").write_bytes(b"garbage")


DAMAGES: dict[str, tuple[Callable[[_Hospitals], object], str]] = {
    "finished": (_finished, "this run is finished"),
    "truncated": (_truncated, "checkpoint can't be read"),
    "garbage": (_garbage, "checkpoint can't be read"),
    "another study": (_of_another_study, "this run's study"),
    "another adapter": (_of_another_adapter, "has shape"),
    "a later round": (_of_a_later_round, "has finished round 7; the study has 3"),
    "no name": (lambda h: (h.folder / "run" / "run.json").unlink(), "no run is there"),
    "a name that isn't one": (lambda h: (h.folder / "run" / "run.json").write_text("{}"), "run's name can't be read"),
    "no study": (lambda h: (h.folder / "run" / "study.json").unlink(), "no run is there"),
    "a study that isn't one": (lambda h: (h.folder / "run" / "study.json").write_text("{"), "study can't be read"),
}


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> _Hospitals:
    hospitals = _Hospitals(tmp_path_factory.mktemp("left"), tiny_model)
    with pytest.MonkeyPatch.context() as patch:
        _kill_after(patch, LoraDpFedAvg, "aggregate_train", 1, before=False)
        with pytest.raises(Killed):
            run_study(hospitals.grid(), hospitals.open())
    return hospitals


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_that_cannot_go_on_is_one_sentence_and_no_site_is_asked(left: _Hospitals, damage: str) -> None:
    folder = left.folder / "run"
    files = {file: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    do, said = DAMAGES[damage]
    grid = left.grid(20)
    try:
        do(left)
        with pytest.raises((CheckpointError, ValueError), match=said):
            run_study(grid, left.reopen())
        assert not grid.sent
    finally:
        (folder / "summary.json").unlink(missing_ok=True)
        for file, content in files.items():
            file.write_bytes(content)


def test_a_run_is_held_by_one_process(left: _Hospitals) -> None:
    workspace = Workspace(left.folder / "run")
    script = "import sys; from pathlib import Path\n"
    script += "from server.checkpoint import held; from server.workspace import Workspace\n"
    script += "with held(Workspace(Path(sys.argv[1]))): print('held')\n"

    def try_it() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script, str(workspace.root)]
        return subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)

    with held(workspace):
        assert "going on in another process" in try_it().stderr
        with pytest.raises(FederationError, match="going on"), held(workspace):
            pass
    assert try_it().stdout == "held\n"


def test_a_checkpoint_reads_back_bit_for_bit(left: _Hospitals, tmp_path: Path) -> None:
    run = left.reopen()
    source = np.random.default_rng(0)
    odd = {
        "file": source.standard_normal((2, 3)).astype("f4"),
        "a/b": np.float32([[np.pi]]),
        "index": np.zeros((0, 2), "f4"),
    }
    state = Checkpoint(
        round=2,
        adapter=odd,
        optimizer={"first/file": source.standard_normal((2, 3)), "count/file": np.array(3)},
        profiles={"self": np.array([1, -2, 3, 4])},
        sites=run.start.sites,
        reports=run.start.reports,
    )
    workspace = Workspace(tmp_path)
    write_checkpoint(workspace, run.study, state)
    back = read_checkpoint(workspace, run.study)
    assert (back.round, tuple(back.sites), tuple(back.reports)) == (2, tuple(state.sites), tuple(state.reports))
    for kind in ("adapter", "optimizer", "profiles"):
        there, here = getattr(back, kind), getattr(state, kind)
        assert list(there) == list(here)
        assert all(np.array_equal(there[n], here[n]) and there[n].dtype == here[n].dtype for n in here)


KILLING = """
import os, signal, sys
from pathlib import Path
import server.server_app as server_app
from tests.server.test_resume import _Hospitals
real = server_app.write_checkpoint
def dying(workspace, study, checkpoint):
    if checkpoint.round == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    real(workspace, study, checkpoint)
server_app.write_checkpoint = dying
hospitals = _Hospitals(Path(sys.argv[1]), Path(sys.argv[2]))
server_app.run_study(hospitals.grid(), hospitals.open())
"""


def test_a_process_that_is_killed_for_real_leaves_a_run_that_goes_on(tmp_path: Path, tiny_model: Path) -> None:
    command = [sys.executable, "-c", KILLING, str(tmp_path), str(tiny_model)]
    died = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    hospitals = _Hospitals.__new__(_Hospitals)
    hospitals.folder = tmp_path
    hospitals.files = {n: tmp_path / "sites" / f"{name}.toml" for n, (name, _) in TIERS.items()}
    assert hospitals.reopen().start.round == 1
    run_study(hospitals.grid(10), hospitals.reopen())
    _assert_whole(hospitals)
    assert read_pool(Workspace(tmp_path / "run").pool).texts
