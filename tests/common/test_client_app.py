"""The dispatcher: routes by tier, imports lazily, and lets no exception text out."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

import client_weak.client_app
from common.client_app import app
from common.errors import FedcorpusError, WireCode
from common.protocol import CENSUS, PROFILE_AND_VOTE, TRAIN, CandidatePool, CensusRequest, VoteRequest
from common.study import Study
from tests.hospitals import rows, small_study, write_site
from tests.in_process import identify

SECRET = "Mrs Zwiebelfisch of bed 12"


@pytest.fixture(autouse=True)
def _identity() -> None:
    identify()


@pytest.fixture
def study() -> Study:
    return Study.model_validate(small_study(Path("package:none")))


def _context(site: Path | None, **run_config: str) -> Context:
    return Context(1, 7, {"site": str(site)} if site else {}, RecordDict(), dict(run_config))


def _ask(kind: str, records: RecordDict, context: Context) -> Message:
    return app(Message(records, dst_node_id=7, message_type=kind), context)


def _vote(study: Study) -> RecordDict:
    return VoteRequest(study, "run", CandidatePool(("a", "b"), np.array([0, 1], np.int32))).to_records()


@pytest.mark.parametrize("error", [RuntimeError(SECRET), KeyError(SECRET), FedcorpusError(SECRET), MemoryError(SECRET)])
def test_exception_text_never_leaves_the_site(
    tmp_path: Path, study: Study, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(client_weak.client_app, "noisy_ballot", fail)
    site = write_site(tmp_path, "east", "weak", rows(40))
    with caplog.at_level(logging.ERROR):
        reply = _ask(PROFILE_AND_VOTE, _vote(study), _context(site))
    assert (reply.error.code, reply.error.reason) == (WireCode.INTERNAL, "INTERNAL")
    assert type(error).__name__ in caplog.text, "the operator sees what and where in the site's own log"
    assert isinstance(error, FedcorpusError) or SECRET not in caplog.text, "a stranger's exception may quote a note"


def test_an_unreadable_note_is_a_code_on_the_wire(tmp_path: Path, study: Study) -> None:
    site = write_site(tmp_path, "east", "weak", rows(40))
    (tmp_path / "hospitals" / "east" / "documents.parquet").write_bytes(SECRET.encode())
    reply = _ask(PROFILE_AND_VOTE, _vote(study), _context(site))
    assert reply.error.code == WireCode.DATA_UNUSABLE
    assert reply.error.reason == "DATA_UNUSABLE"


@pytest.mark.parametrize(
    ("tier", "asked"), [("weak", TRAIN), ("strong", PROFILE_AND_VOTE), ("weak", "query.dump"), ("strong", "evaluate")]
)
def test_a_site_answers_its_tiers_questions_only(tmp_path: Path, study: Study, tier: str, asked: str) -> None:
    reply = _ask(asked, _vote(study), _context(write_site(tmp_path, "east", tier, rows(40))))
    assert reply.error.code == WireCode.WRONG_TIER


def test_a_node_without_a_site_file_does_not_take_the_coordinators_word(tmp_path: Path, study: Study) -> None:
    """``simulated-sites`` counts in a simulation only, where the node has a partition number."""
    write_site(tmp_path, "east", "weak", rows(40))
    records = CensusRequest(study, "run").to_records()
    reply = _ask(CENSUS, records, _context(None, **{"simulated-sites": str(tmp_path / "sites")}))
    assert reply.error.code == WireCode.NOT_CONFIGURED


def test_no_policy_no_start(tmp_path: Path, study: Study) -> None:
    site = write_site(tmp_path, "east", "weak", rows(40))
    text = site.read_text()
    site.write_text(text[: text.index("[policy]")])
    reply = _ask(CENSUS, CensusRequest(study, "run").to_records(), _context(site))
    assert reply.error.code == WireCode.NOT_CONFIGURED


def test_an_unknown_protocol_version_is_refused_by_name(tmp_path: Path, study: Study) -> None:
    records = CensusRequest(study, "run").to_records()
    records["request"] = ConfigRecord({**records["request"], "protocol": 99})
    reply = _ask(CENSUS, records, _context(write_site(tmp_path, "east", "weak", rows(40))))
    assert reply.error.code == WireCode.UNKNOWN_PROTOCOL


def test_an_empty_hospital_answers_with_noise_only_and_looks_like_any_other(tmp_path: Path, study: Study) -> None:
    nobody = [{**row, "topic": "undeclared"} for row in rows(40)]
    site = write_site(tmp_path, "east", "weak", nobody)
    reply = _ask(PROFILE_AND_VOTE, _vote(study), _context(site))
    assert set(reply.content) == {"release", "ledger"}
