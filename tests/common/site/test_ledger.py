"""The ledger: durable, append-only, one writer; killed, copied, tampered with or out of disk, it charges once."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import resource
import signal
import sqlite3
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from common import protocol
from common.errors import BudgetExceededError, ExitCode, FedcorpusError, LedgerError, SiteConfigError, WireCode
from common.privacy.noise import discrete_gaussian
from common.privacy.values import ExactCounts
from common.protocol import CandidatePool, VoteRequest
from common.site import door as door_module
from common.site import journal as journal_module
from common.site import ledger as ledger_module
from common.site.config import Site
from common.site.door import Answer, Compute, Door, Task
from common.site.journal import Event, follow_chain
from common.site.ledger import Ledger
from common.site.plan import site_plan
from common.study import Study

STUDY = Study.model_validate(
    {
        "name": "ledger",
        "codes": {"attributes": [{"name": "topic", "values": ["a", "b"]}]},
        "privacy": {"epsilon": 4.0, "delta": 1e-4},
        "generator": {"base": "package:none"},
        "training": {"batch_size": 10},
        "federation": {"min_documents": 20},
    }
)
KEY = "0123456789abcdef" * 4
FORK = multiprocessing.get_context("fork")


def _site(folder: Path, key: Path | None = None, max_epsilon: float = 9.0) -> Site:
    return Site.model_validate(
        {
            "name": "hospital",
            "tier": "weak",
            "size_class": 20,
            "state": folder / "state",
            "documents": {"path": folder / "documents.csv"},
            "policy": {"max_epsilon": max_epsilon, "max_delta": 1e-2},
            "ledger_key_file": key,
        }
    )


def _vote(run: str = "run") -> VoteRequest:
    return VoteRequest(STUDY, run, CandidatePool(("x", "y"), np.array([0, 1], np.int32)))


def _prepare() -> Compute:
    def compute(_: Task) -> Answer:
        counts = ExactCounts(np.array([100, 200]), 1)
        # Much noise, so that two draws are never equal.
        return Answer({"profile": discrete_gaussian(counts, 1e6), "ballot": discrete_gaussian(counts, 1e6)})

    return compute


def _answer(site: Site, run: str = "run") -> bytes:
    records = Door(site).release(_vote(run), _prepare).to_records()
    return bytes(records["release"]["bytes"].numpy().tobytes())


def _kinds(site: Site) -> list[str]:
    with Ledger.of(site) as ledger:
        return [event["kind"] for event in ledger.export("hospital")["events"]]


# Killed at every line


def _die_at(line: int) -> None:
    """From now on, this process is killed when the door or the ledger comes to its ``line``-th line."""
    watched = {door_module.__file__, ledger_module.__file__, journal_module.__file__, protocol.__file__}
    seen = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal seen
        if frame.f_code.co_filename not in watched:
            return None
        if event == "line":
            seen += 1
            if seen == line:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def _in_child(work: Callable[[], object]) -> int | None:
    child = FORK.Process(target=work)
    child.start()
    child.join(60)
    return child.exitcode


def _killed(site: Site, line: int) -> bool:
    def work() -> None:
        _die_at(line)
        _answer(site)

    return _in_child(work) == -signal.SIGKILL


def _broken_promises(folder: Path, most: int = 10_000) -> tuple[int, list[str]]:
    """Kill a site at every line of its door in turn; lines at which it was killed, and what was wrong after it."""
    site_plan(STUDY, "weak", 20)
    wrong: list[str] = []
    for line in range(1, most + 1):
        site = _site(folder / str(line))
        if not _killed(site, line):
            return line - 1, wrong
        before = _kinds(site)
        first, second = _answer(site), _answer(site)
        if first != second:
            wrong.append(f"line {line}: two answers")
        if _kinds(site) != ["opened", "reservation", "release"]:
            wrong.append(f"line {line}: events {_kinds(site)}")
        if "release" in before and _kinds(site) != before:
            wrong.append(f"line {line}: computed again what was stored")
    return most, wrong


def test_killed_at_any_line_of_the_door_a_site_is_charged_once_and_answers_once(tmp_path: Path) -> None:
    lines, wrong = _broken_promises(tmp_path)
    assert lines > 100, "the door and the ledger have more lines than that"
    assert not wrong


@pytest.mark.parametrize("step", ["store", "reserve"])
def test_killing_a_door_that_leaves_out_a_step_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Twin."""
    monkeypatch.setattr(Ledger, step, lambda *_, **__: None)
    if step == "reserve":
        monkeypatch.setattr(Ledger, "store", _store_unreserved)
    _, wrong = _broken_promises(tmp_path, most=5)
    assert len(wrong) >= 5


def _store_unreserved(
    ledger: Ledger, site: str, study: str, run: str, key: str, digest: str, *rest: Any, kept: bytes
) -> None:
    parts, released = rest
    assert not kept
    content = {"site": site, "study": study, "run": run, "key": key, "digest": digest, "parts": parts}
    content |= {"sha256": hashlib.sha256(released).hexdigest()}
    with ledger._journal.transaction():
        ledger._journal.append("release", content, site, study, run, key, released=released)


# Many processes


def _answer_into(site: Site, run: str, results: Any) -> None:
    try:
        results.put((run, _answer(site, run)))
    except BudgetExceededError:
        results.put((run, None))


def test_fifty_processes_get_one_answer_a_run_and_never_pass_the_cap(tmp_path: Path) -> None:
    site = _site(tmp_path, max_epsilon=20.0)
    site_plan(STUDY, "weak", 20)
    results = FORK.Queue()
    runs = [f"run{i % 10}" for i in range(50)]
    children = [FORK.Process(target=_answer_into, args=(site, run, results)) for run in runs]
    for child in children:
        child.start()
    given = [results.get(timeout=120) for _ in children]
    for child in children:
        child.join(60)
    answers = {run: {answer for r, answer in given if r == run} for run in runs}
    assert all(len(of_run) == 1 for of_run in answers.values())
    assert sum(of_run != {None} for of_run in answers.values()) == 5, "five runs of epsilon 4 fit into 20"
    with Ledger.of(site) as ledger:
        assert ledger.spent()[0] <= 20
        ledger.verify(blobs=True)


# Tampering


@pytest.mark.parametrize("table", ["event", "blob"])
@pytest.mark.parametrize("verb", ["UPDATE {} SET identity = 'x'", "DELETE FROM {}"])
def test_the_ledger_is_append_only(tmp_path: Path, table: str, verb: str) -> None:
    site = _site(tmp_path)
    _answer(site)
    database = sqlite3.connect(site.ledger_path)
    with pytest.raises(sqlite3.Error, match="append-only"):
        database.execute(verb.format(table))
    database.close()


def _tamper(site: Site, statement: str) -> None:
    database = sqlite3.connect(site.ledger_path)
    triggers = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'")]
    database.executescript("".join(f"DROP TRIGGER {name};" for name in triggers) + statement)
    database.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE event SET content = replace(content, '\"epsilon\":3.9', '\"epsilon\":0.9') WHERE kind = 'reservation';",
        "UPDATE event SET kind = 'decision' WHERE kind = 'reservation';",
        "UPDATE event SET previous = hash WHERE sequence = 2;",
        "UPDATE event SET hash = '0' WHERE sequence = 3;",
        "UPDATE event SET sequence = 9 WHERE sequence = 3;",
        "UPDATE event SET content = 'not json' WHERE sequence = 2;",
        "DELETE FROM event WHERE sequence = 2;",
        "DELETE FROM event WHERE sequence = 1;",
    ],
)
def test_a_changed_ledger_releases_nothing(tmp_path: Path, statement: str) -> None:
    site = _site(tmp_path)
    _answer(site)
    _tamper(site, f"PRAGMA foreign_keys=OFF; {statement}")
    with pytest.raises(LedgerError, match="ledger was changed"):
        _answer(site, "another")


@pytest.mark.parametrize("statement", ["UPDATE blob SET bytes = x'00';", "DELETE FROM blob;"])
def test_changed_bytes_of_a_release_are_not_given_out(tmp_path: Path, statement: str) -> None:
    site = _site(tmp_path)
    _answer(site)
    _tamper(site, statement)
    with pytest.raises(LedgerError, match="bytes of release 3 were changed"):
        _answer(site)
    with Ledger.of(site) as ledger, pytest.raises(LedgerError):
        ledger.verify(blobs=True)


def test_a_part_is_given_out_once_and_only_if_it_was_planned(tmp_path: Path) -> None:
    site = _site(tmp_path)
    _answer(site)
    with Ledger.of(site) as ledger:
        for part in ("votes", "train/1"):
            with pytest.raises(LedgerError, match="can't be given out"):
                ledger.store("hospital", STUDY.sha256, "run", "other key", "digest", [part], b"bytes")


def test_a_ledger_of_another_version_is_not_started_anew(tmp_path: Path) -> None:
    """Its charges would be forgotten."""
    old, future = _site(tmp_path / "old"), _site(tmp_path / "future")
    old.state.mkdir(parents=True)
    database = sqlite3.connect(old.ledger_path)
    database.execute("CREATE TABLE reservation (epsilon REAL)")
    database.close()
    with pytest.raises(LedgerError, match="holds table 'reservation'"):
        _answer(old)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_module, "FORMAT", 99)
        _answer(future)
    with pytest.raises(LedgerError, match="not a ledger of format 2"):
        _answer(future)


# Disks


def _errors_of(work: Callable[[], object]) -> str:
    """Class of the error that ``work`` ends with in a child process, or ''."""
    receive, send = FORK.Pipe(duplex=False)

    def report() -> None:
        try:
            work()
        except FedcorpusError as error:
            send.send(type(error).__name__)
        else:
            send.send("")

    assert _in_child(report) == 0
    return str(receive.recv())


def _limit_file_size(size: int) -> None:
    # The kernel then refuses to let any file grow further, as a full disk does.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_on_a_full_disk_nothing_is_released_and_nothing_is_lost(tmp_path: Path) -> None:
    site_plan(STUDY, "weak", 20)
    outcomes = []
    for number, size in enumerate(range(0, 200_000, 8_000)):
        site = _site(tmp_path / str(number))

        def work(site: Site = site, size: int = size) -> None:
            _limit_file_size(size)
            _answer(site)

        outcomes.append(_errors_of(work))
        first, second = _answer(site), _answer(site)
        assert first == second
        assert _kinds(site) == ["opened", "reservation", "release"]
    assert outcomes[0] == "LedgerError"
    assert outcomes[-1] == ""
    assert set(outcomes) == {"LedgerError", ""}


def test_on_a_read_only_disk_nothing_is_released(tmp_path: Path) -> None:
    fresh, used = _site(tmp_path / "fresh"), _site(tmp_path / "used")
    _answer(used)
    for site in (fresh, used):
        site.state.mkdir(parents=True, exist_ok=True)
        for file in site.state.iterdir():
            file.chmod(0o444)
        site.state.chmod(0o555)
        tmp_path.chmod(0o755)

        def work(site: Site = site) -> None:
            if os.getuid() == 0:
                # Root writes anywhere.
                for folder in (*site.state.parents, site.state):
                    if folder.is_relative_to(tmp_path.parents[1]):
                        folder.chmod(folder.stat().st_mode | 0o055)
                os.setuid(65534)
            _answer(site, "another")

        assert _errors_of(work) == "LedgerError"


# Reading it


def test_an_export_has_every_event_no_bytes_and_a_chain_that_can_be_followed(tmp_path: Path) -> None:
    site = _site(tmp_path)
    answer = _answer(site)
    with Ledger.of(site) as ledger:
        exported = json.loads(json.dumps(ledger.export("hospital")))
        head = ledger.head()
    follow_chain("export", [Event(**event) for event in exported["events"]])
    assert (exported["ledger"], exported["events"][-1]["hash"]) == (head.ledger, head.hash)
    assert answer.hex() not in json.dumps(exported)
    reservation = exported["events"][1]["content"]
    assert reservation["mechanisms"][0]["mechanism"] == "discrete-gaussian"
    assert {"unit", "adjacency", "accountant", "policy", "epsilon", "delta", "parts", "assets"} <= set(reservation)
    exported["events"][1]["content"]["epsilon"] = 0.1
    with pytest.raises(LedgerError, match="event 2"):
        follow_chain("export", [Event(**event) for event in exported["events"]])


def test_only_its_owner_reads_the_ledger(tmp_path: Path) -> None:
    site = _site(tmp_path)
    before = os.umask(0)
    try:
        _answer(site)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) & 0o077 for file in site.state.iterdir()} == {0}


# Encryption


@pytest.fixture
def key(tmp_path: Path) -> Path:
    file = tmp_path / "ledger.key"
    file.write_text(KEY + "\n")
    file.chmod(0o600)
    return file


def test_an_encrypted_ledger_works_as_an_open_one_and_shows_nothing(tmp_path: Path, key: Path) -> None:
    site = _site(tmp_path, key)
    answer = _answer(site)
    assert _answer(site) == answer
    on_disk = b"".join(file.read_bytes() for file in site.state.iterdir())
    for secret in (STUDY.sha256.encode(), b"hospital", b"discrete-gaussian", answer[:40]):
        assert secret not in on_disk
    with Ledger.of(site) as ledger:
        ledger.verify(blobs=True)
        assert STUDY.sha256 in json.dumps(ledger.export("hospital"))


def test_an_open_ledger_would_have_shown_it(tmp_path: Path) -> None:
    """Twin."""
    site = _site(tmp_path)
    _answer(site)
    assert STUDY.sha256.encode() in b"".join(file.read_bytes() for file in site.state.iterdir())


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [(KEY, "f" * 64, "isn't its key"), (KEY, None, "is encrypted"), (None, KEY, "not encrypted")],
)
def test_a_ledger_opens_with_the_setting_it_was_made_with_only(
    tmp_path: Path, key: Path, before: str | None, after: str | None, said: str
) -> None:
    key.write_text(before or KEY)
    _answer(_site(tmp_path, key if before else None))
    key.write_text(after or KEY)
    with pytest.raises(LedgerError, match=said):
        _answer(_site(tmp_path, key if after else None), "another")


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (KEY[:-1], 0o600, "63 characters"),
        ("g" * 64, 0o600, "hexadecimal"),
        (KEY, 0o644, "mode 644"),
        ("é", 0o600, "read"),
    ],
)
def test_a_key_file_that_is_none_is_refused_and_not_quoted(
    tmp_path: Path, key: Path, content: str, mode: int, said: str
) -> None:
    key.write_text(content)
    key.chmod(mode)
    with pytest.raises(SiteConfigError, match=said) as caught:
        _answer(_site(tmp_path, key))
    assert content not in str(caught.value)
    assert (caught.value.exit_code, caught.value.wire_code) == (ExitCode.USAGE, WireCode.NOT_CONFIGURED)
