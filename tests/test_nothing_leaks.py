"""Nothing exact leaves: canary texts, names and counts are planted, every path is run, and what is left is searched.

Searched are the replies as they cross the wire, the logs, standard output and error, the ledger's files, and whatever
lies in the temporary folder. The twins put a canary into each of these places, and the search must find it.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

import client_strong.client_app
import client_weak.client_app
import common.client_app
import common.protocol
import common.site.door
from common.client_app import app
from common.logs import NAME
from common.models.generator import Generator
from common.protocol import (
    CENSUS,
    PROFILE_AND_VOTE,
    TRAIN,
    CandidatePool,
    CensusRequest,
    TrainRequest,
    VoteRequest,
)
from common.site.config import Site
from common.site.documents import Documents
from common.site.ledger import Ledger
from common.study import Study
from tests.hospitals import small_study, write_site
from tests.in_process import identify

TEXT, PATIENT, VALUE = "Zwiebelfisch ward nine", "Blumentopferde", "Quastenflosser"
COUNTS = {("staff", 1): 1237, ("staff", 2): 1193, ("parking", 1): 1151, ("parking", 2): 1148}
"""Documents under each code: numbers that nothing else here shows."""
UNDECLARED = 1129
EXACT = (*COUNTS.values(), sum(COUNTS.values()), UNDECLARED, sum(COUNTS.values()) + UNDECLARED)


def _documents() -> list[dict[str, Any]]:
    known = [(topic, tone) for (topic, tone), count in COUNTS.items() for _ in range(count)]
    return [
        {"text": f"{TEXT} {i}", "topic": topic, "tone": tone, "patient": f"{PATIENT}-{i}"}
        for i, (topic, tone) in enumerate(known + [(VALUE, 1)] * UNDECLARED)
    ]


@dataclass
class Traces:
    """Everything that was left somewhere, by the place it was found."""

    found: dict[str, bytes] = field(default_factory=dict)

    def add(self, place: str, data: bytes) -> None:
        self.found[place] = self.found.get(place, b"") + b"\n" + data

    def leaks(self) -> list[str]:
        """Places that show a canary text, in any common encoding, or an exact count as a number in words."""
        return sorted({f"{place}: {what}" for place, data in self.found.items() for what in _canaries_in(data)})


def _canaries_in(data: bytes) -> Iterator[str]:
    for canary in (TEXT, PATIENT, VALUE):
        plain = canary.encode()
        # Of base64, what doesn't depend on where in the stream the text begins.
        coded = [base64.b64encode(b"\0" * shift + plain)[4:-4] for shift in range(3)]
        if any(form in data for form in (plain, canary.encode("utf-16-le"), plain.hex().encode(), *coded)):
            yield canary
    for count in EXACT:
        if re.search(rb"(?<![0-9a-zA-Z.])%d(?![0-9a-zA-Z])" % count, data):
            yield str(count)


class Hospital:
    """A site full of canaries whose surroundings are searched."""

    def __init__(self, folder: Path, tier: str, base: Path, extra: str = "", **privacy: Any) -> None:
        identify()
        self.study = Study.model_validate(small_study(base, privacy={"epsilon": 0.5, **privacy}))
        self.file = write_site(folder, "hospital", tier, _documents(), extra, size_class=1000)
        self.site = Site.load(self.file)
        self.base = base

    def ask(self, kind: str, run: str = "run") -> Message:
        context = Context(1, 7, {"site": str(self.file)}, RecordDict(), {})
        return app(Message(self._question(kind, run), dst_node_id=7, message_type=kind), context)

    def _question(self, kind: str, run: str) -> RecordDict:
        if kind == CENSUS:
            return CensusRequest(self.study, run).to_records()
        if kind == PROFILE_AND_VOTE:
            pool = CandidatePool(tuple(f"candidate {i}" for i in range(8)), np.arange(8, dtype=np.int32) % 4)
            return VoteRequest(self.study, run, pool).to_records()
        generator = Generator(self.study.generator)
        return TrainRequest(self.study, run, 1, generator.adapter(), generator.frozen_sha256()).to_records()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.fixture
def search(
    temporary: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> Callable[[Hospital, Message], list[str]]:
    # The site's own logger too: whatever ran before in this process may have left it silent, and the search blind.
    for name in (None, NAME):
        caplog.set_level(logging.DEBUG, name)

    def run(hospital: Hospital, reply: Message) -> list[str]:
        traces = Traces()
        # The objects Flower would send, and what it says of the message.
        for data in (v.deflate() for v in get_all_nested_objects(reply).values()):
            traces.add("reply", data)
        traces.add("reply", repr(reply.metadata).encode())
        traces.add("log", caplog.text.encode())
        traces.add("screen", "".join(capfd.readouterr()).encode())
        for place, folder in (("ledger", hospital.site.state), ("temporary files", temporary)):
            for file in (f for f in folder.rglob("*") if f.is_file()):
                traces.add(place, str(file.relative_to(folder)).encode() + b"\n" + file.read_bytes())
        return traces.leaks()

    return run


Search = Callable[[Hospital, Message], list[str]]
TIERS = [("weak", PROFILE_AND_VOTE), ("strong", TRAIN)]


@pytest.mark.parametrize(("tier", "kind"), TIERS)
@pytest.mark.parametrize("unit", ["record", "patient"])
def test_an_answer_shows_nothing_exact_anywhere(
    tmp_path: Path, tiny_model: Path, search: Search, tier: str, kind: str, unit: str
) -> None:
    hospital = Hospital(tmp_path, tier, tiny_model, unit=unit)
    census, reply, again = hospital.ask(CENSUS), hospital.ask(kind), hospital.ask(kind)
    assert reply.has_content()
    for message in (census, reply, again):
        assert search(hospital, message) == []


def _file_is_text(hospital: Hospital, _: pytest.MonkeyPatch) -> None:
    hospital.site.documents.path.write_text(f"{TEXT} {PATIENT}")


def _file_is_gone(hospital: Hospital, _: pytest.MonkeyPatch) -> None:
    hospital.site.documents.path.unlink()


def _rows_are_malformed(hospital: Hospital, _: pytest.MonkeyPatch) -> None:
    path = hospital.site.documents.path.with_suffix(".jsonl")
    rows = [json.dumps(row) for row in _documents()]
    path.write_text("\n".join([*rows, f'{{"text": "{TEXT}", "topic": "{VALUE}", "tone":']))
    _edit(hospital, "documents.parquet", "documents.jsonl", 'patient_column = "patient"', 'on_malformed = "stop"')


def _column_is_missing(hospital: Hospital, _: pytest.MonkeyPatch) -> None:
    _edit(hospital, 'patient_column = "patient"', f'text_column = "{VALUE[:4]}"')


def _policy_refuses(hospital: Hospital, _: pytest.MonkeyPatch) -> None:
    _edit(hospital, "max_epsilon = 20.0", "max_epsilon = 0.1")


def _budget_is_spent(hospital: Hospital, _: pytest.MonkeyPatch) -> None:
    _edit(hospital, "max_epsilon = 20.0", "max_epsilon = 0.6")
    hospital.ask(PROFILE_AND_VOTE if hospital.site.tier == "weak" else TRAIN, run="an earlier one")


def _ledger_is_damaged(hospital: Hospital, _: pytest.MonkeyPatch) -> None:
    hospital.site.state.mkdir()
    hospital.site.ledger_path.write_bytes(b"no database " * 100)


def _edit(hospital: Hospital, *replacements: str) -> None:
    text = hospital.file.read_text()
    for old, new in zip(replacements[::2], replacements[1::2], strict=True):
        assert old in text
        text = text.replace(old, new)
    hospital.file.write_text(text)


BAD = [
    _file_is_text,
    _file_is_gone,
    _rows_are_malformed,
    _column_is_missing,
    _policy_refuses,
    _budget_is_spent,
    _ledger_is_damaged,
]


@pytest.mark.parametrize(("tier", "kind"), TIERS)
@pytest.mark.parametrize("damage", BAD, ids=lambda f: f.__name__.strip("_"))
def test_a_failure_shows_nothing_exact_anywhere(
    tmp_path: Path,
    tiny_model: Path,
    search: Search,
    monkeypatch: pytest.MonkeyPatch,
    tier: str,
    kind: str,
    damage: Callable[[Hospital, pytest.MonkeyPatch], None],
) -> None:
    hospital = Hospital(tmp_path, tier, tiny_model)
    damage(hospital, monkeypatch)
    reply = hospital.ask(kind)
    assert reply.has_error()
    assert search(hospital, reply) == []
    assert search(hospital, hospital.ask(CENSUS)) == []


def _raising(*_: object, **__: object) -> Any:
    raise ValueError(f"could not convert {TEXT!r} of {PATIENT} ({VALUE}), one of {COUNTS['staff', 1]}")


STEPS = [
    ("weak", client_weak.client_app, "load_embedder"),
    ("weak", client_weak.client_app, "noisy_profile"),
    ("weak", client_weak.client_app, "noisy_ballot"),
    ("strong", client_strong.client_app, "noisy_profile"),
    ("strong", client_strong.client_app, "train_round"),
    ("strong", client_strong.client_app, "_ready"),
    ("strong", client_strong.client_app, "check_gradients"),
    *((tier, Documents, "load") for tier in ("weak", "strong")),
    *((tier, common.site.door, "check_request") for tier in ("weak", "strong")),
    *((tier, Ledger, step) for tier in ("weak", "strong") for step in ("stored", "reserve", "store", "head")),
    *((tier, common.protocol, step) for tier in ("weak", "strong") for step in ("pack_release", "release_records")),
]


@pytest.mark.parametrize(("tier", "owner", "step"), STEPS)
def test_an_exception_that_quotes_a_note_shows_nothing_anywhere(
    tmp_path: Path,
    tiny_model: Path,
    search: Search,
    monkeypatch: pytest.MonkeyPatch,
    tier: str,
    owner: Any,
    step: str,
) -> None:
    hospital = Hospital(tmp_path, tier, tiny_model)
    question = dict(TIERS)[tier]
    hospital.ask(CENSUS)
    # The model and its self-test are kept for a process's life.
    client_strong.client_app._ready.cache_clear()
    monkeypatch.setattr(owner, step, _raising)
    reply = hospital.ask(question)
    assert (reply.error.code, reply.error.reason) == (1001, "INTERNAL")
    assert search(hospital, reply) == []


class _Jammed(io.StringIO):
    """Standard error that fails once, as on a disk that is full for a moment."""

    jammed = True

    def write(self, text: str, /) -> int:
        if self.jammed:
            self.jammed = False
            raise OSError("No space left on device")
        return super().write(text)


@pytest.mark.parametrize("step", ["noisy_ballot", "load_embedder"])
def test_a_log_that_cannot_be_written_does_not_print_the_exception_instead(
    tmp_path: Path, tiny_model: Path, search: Search, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Python's logging answers a failing log with the traceback of the exception in hand, text and all."""
    hospital = Hospital(tmp_path, "weak", tiny_model)
    monkeypatch.setattr(client_weak.client_app, step, _raising)
    hospital.ask(CENSUS)
    stderr = _Jammed()
    monkeypatch.setattr(sys, "stderr", stderr)
    reply = hospital.ask(PROFILE_AND_VOTE)
    assert not stderr.jammed
    assert reply.has_error()
    assert TEXT not in stderr.getvalue()
    assert search(hospital, reply) == []


def test_a_killed_site_leaves_nothing_exact_behind(tmp_path: Path, tiny_model: Path, temporary: Path) -> None:
    """A process of its own, killed within the mechanism, when exact counts exist and no noise is on them."""
    hospital = Hospital(tmp_path, "weak", tiny_model)
    code = (
        "import os, signal, sys\n"
        "import client_weak.votes as votes\n"
        "votes.discrete_gaussian = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "from pathlib import Path\n"
        "from tests.test_nothing_leaks import PROFILE_AND_VOTE, Hospital\n"
        "hospital = Hospital.__new__(Hospital)\n"
        "hospital.__dict__.update(file=Path(sys.argv[1]), base=Path(sys.argv[2]))\n"
        "from common.site.config import Site\nfrom common.study import Study\nfrom tests.in_process import identify\n"
        "identify()\n"
        "hospital.site = Site.load(hospital.file)\n"
        "hospital.study = Study.from_canonical(sys.argv[3])\n"
        "hospital.ask(PROFILE_AND_VOTE)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(hospital.file), str(tiny_model), hospital.study.canonical],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == -signal.SIGKILL, result.stderr.decode()
    traces = Traces({"screen": result.stdout + result.stderr})
    for folder in (hospital.site.state, temporary):
        for file in (f for f in folder.rglob("*") if f.is_file()):
            traces.add(str(file), file.read_bytes())
    assert traces.leaks() == []
    with Ledger.of(hospital.site) as ledger:
        assert [e["kind"] for e in ledger.export("hospital")["events"]] == ["opened", "reservation"]


# Twins: each protection off, and the search must find it.


def test_an_exception_on_the_wire_would_be_found(
    tmp_path: Path, tiny_model: Path, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    hospital = Hospital(tmp_path, "weak", tiny_model)
    monkeypatch.setattr(client_weak.client_app, "noisy_ballot", _raising)

    def forward(message: Message, _code: object) -> Message:
        return Message(Error(code=1, reason=f"could not convert {TEXT}"), reply_to=message)

    monkeypatch.setattr(common.client_app, "_coded", forward)
    assert f"reply: {TEXT}" in search(hospital, hospital.ask(PROFILE_AND_VOTE))


def test_an_exceptions_text_in_the_log_would_be_found(
    tmp_path: Path, tiny_model: Path, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    hospital = Hospital(tmp_path, "weak", tiny_model)
    monkeypatch.setattr(client_weak.client_app, "noisy_ballot", _raising)
    monkeypatch.setattr(common.client_app, "_where", str)
    found = search(hospital, hospital.ask(PROFILE_AND_VOTE))
    assert {f"log: {TEXT}", f"log: {COUNTS['staff', 1]}"} <= set(found)


def test_a_report_of_the_documents_in_the_log_would_be_found(
    tmp_path: Path, tiny_model: Path, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    hospital = Hospital(tmp_path, "weak", tiny_model)
    load = Documents.load

    def tell(site: Site, study: Study) -> Documents:
        documents = load(site, study)
        logging.getLogger("fedcorpus.site").info("%s", documents.report())
        return documents

    monkeypatch.setattr(Documents, "load", tell)
    found = search(hospital, hospital.ask(PROFILE_AND_VOTE))
    assert {f"log: {sum(COUNTS.values())}", f"log: {UNDECLARED}"} <= set(found)


def test_exact_counts_in_the_ledger_or_a_temporary_file_would_be_found(
    tmp_path: Path, tiny_model: Path, search: Search, temporary: Path
) -> None:
    hospital = Hospital(tmp_path, "weak", tiny_model)
    reply = hospital.ask(PROFILE_AND_VOTE)
    with Ledger.of(hospital.site) as ledger:
        ledger.decide("hospital", "0" * 64, "approved", f"{PATIENT} of {COUNTS['parking', 2]}")
    (temporary / "cache.bin").write_bytes(base64.b64encode(f"... {TEXT} ...".encode()))
    assert search(hospital, reply) == [
        f"ledger: {COUNTS['parking', 2]}",
        f"ledger: {PATIENT}",
        f"temporary files: {TEXT}",
    ]
