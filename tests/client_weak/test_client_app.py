"""A weak site answers once, and what it can't take is refused in a code, before anything is charged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict

import client_weak.client_app
from client_weak.embedding_cache import FILE
from common import protocol
from common.client_app import app
from common.errors import WireCode
from common.models.embedder import Embedder, Embeddings, load_embedder, manifest_of_embedder
from common.protocol import PROFILE_AND_VOTE, CandidatePool, VoteReply, VoteRequest
from common.site.config import Site
from common.site.ledger import Ledger
from common.study import Study, Voting
from tests.hospitals import rows, small_study, write_site
from tests.in_process import identify

TEXTS = tuple(f"Comment {i} about the {'staff' if i % 2 else 'parking'}." for i in range(24))
CODES = np.arange(24, dtype=np.int32) % 4


@pytest.fixture(autouse=True)
def _identity() -> None:
    identify()


def _study(**voting: Any) -> Study:
    return Study.model_validate(small_study(Path("package:none")) | {"voting": voting})


def _ask(site: Path, records: RecordDict) -> Message:
    context = Context(1, 7, {"site": str(site)}, RecordDict(), {})
    return app(Message(records, dst_node_id=7, message_type=PROFILE_AND_VOTE), context)


def _records(study: Study, texts: tuple[str, ...] = TEXTS, codes: np.ndarray = CODES) -> RecordDict:
    return VoteRequest(study, "run", CandidatePool(texts, codes)).to_records()


def _replaced(records: RecordDict, **arrays: np.ndarray) -> RecordDict:
    pool = dict(records.array_records["pool"].items()) | {name: Array(value) for name, value in arrays.items()}
    records["pool"] = ArrayRecord(pool)
    return records


def _spent(site: Path) -> tuple[float, float]:
    with Ledger.of(Site.load(site)) as ledger:
        return ledger.spent()


def _refusal(site: Path, records: RecordDict) -> WireCode:
    reply = _ask(site, records)
    assert reply.has_error()
    assert _spent(site) == (0, 0)
    return WireCode(reply.error.code)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return write_site(tmp_path, "weak", "weak", rows(60))


@pytest.mark.parametrize("similarity", ["cosine", "l2", "inner"])
def test_a_weak_site_answers_once_and_in_the_same_bytes(tmp_path: Path, similarity: str) -> None:
    study = _study(similarity=similarity, embedder_sha256=manifest_of_embedder("wordllama").digest)
    site = write_site(tmp_path, "weak", "weak", rows(60))
    first, again = (_ask(site, _records(study)) for _ in range(2))
    replies = [VoteReply.from_records(message.content, len(study.codes), len(TEXTS)) for message in (first, again)]
    np.testing.assert_array_equal(replies[0].ballot, replies[1].ballot)
    np.testing.assert_array_equal(replies[0].profile, replies[1].profile)


def test_a_site_without_a_document_in_any_code_answers_like_any_other(tmp_path: Path) -> None:
    elsewhere = [row | {"topic": "food"} for row in rows(60)]
    study = _study()
    replies = []
    for name, documents in (("full", rows(60)), ("empty", elsewhere)):
        site = write_site(tmp_path / name, name, "weak", documents)
        message = _ask(site, _records(study))
        replies.append(VoteReply.from_records(message.content, len(study.codes), len(TEXTS)))
    full, empty = replies
    assert full.ballot.shape == empty.ballot.shape
    assert full.profile.shape == empty.profile.shape
    assert np.any(empty.ballot != 0), "noise covers every candidate"


def test_texts_written_to_mislead_a_screen_are_voted_on_as_texts(site: Path) -> None:
    strange = (
        "\u202eevil\u202c",
        "zero\u200bwidth",
        "\x1b[2Jclear",
        "<script>alert(1)</script>",
        "=1+1",
        "",
        " ",
        "\ud800",
    )
    texts = (strange * 3)[: len(TEXTS)]
    assert _ask(site, _records(_study(), texts)).has_content()


def test_ten_million_candidates_are_refused_before_any_is_made(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_unpack_texts", lambda packed: pytest.fail("texts were made"))
    count = 10_000_000
    many = _replaced(
        _records(_study()),
        texts=np.full(2 * count, ord("\n"), dtype=np.uint8),
        codes=np.zeros(count, dtype=np.int32),
    )
    assert _refusal(site, many) is WireCode.BAD_REQUEST


def test_many_texts_behind_few_codes_are_refused_before_any_is_made(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "_unpack_texts", lambda packed: pytest.fail("texts were made"))
    many = _replaced(_records(_study()), texts=np.full(10_000_000, ord("\n"), dtype=np.uint8))
    assert _refusal(site, many) is WireCode.BAD_REQUEST


def test_a_candidate_of_ten_megabytes_is_refused(site: Path) -> None:
    assert _refusal(site, _records(_study(), ("a " * 5_000_000, *TEXTS[1:]))) is WireCode.REFUSED_BY_POLICY


@pytest.mark.parametrize("code", [-1, 4])
def test_a_pool_with_codes_that_the_study_lacks_is_refused(site: Path, code: int) -> None:
    assert _refusal(site, _records(_study(), TEXTS, np.full(24, code, dtype=np.int32))) is WireCode.BAD_REQUEST


@pytest.mark.parametrize(
    ("voting", "refusal"),
    [
        ({"embedder_sha256": "0" * 64}, WireCode.MODEL_UNUSABLE),
        ({"embedder": "word2vec"}, WireCode.MODEL_UNUSABLE),
        ({"embedder": "sentence-transformers:/nowhere"}, None),
    ],
)
def test_another_embedder_is_refused(site: Path, voting: Mapping[str, Any], refusal: WireCode | None) -> None:
    # Without the library that is what is missing; with it, the folder.
    accepted = {refusal} if refusal else {WireCode.MISSING_EXTRA, WireCode.MODEL_UNUSABLE}
    assert _refusal(site, _records(_study(**voting))) in accepted


class _Watched:
    """The study's embedder, which tells what it is asked and may break down at a text."""

    def __init__(self, embedder: Embedder, breaks_at: str = "nothing of this kind") -> None:
        self.seen: list[str] = []
        self._embedder, self._breaks_at = embedder, breaks_at

    def embed(self, texts: Sequence[str]) -> Embeddings:
        self.seen += texts
        if any(self._breaks_at in text for text in texts):
            raise MemoryError(self._breaks_at)
        return self._embedder.embed(texts)


@pytest.mark.parametrize("breaks_at", ["Comment number 7 ", TEXTS[5]])
def test_texts_that_cannot_be_embedded_cost_nothing(
    site: Path, monkeypatch: pytest.MonkeyPatch, breaks_at: str
) -> None:
    watched = _Watched(load_embedder(Voting()), breaks_at)
    monkeypatch.setattr(client_weak.client_app, "load_embedder", lambda *_: watched)
    assert _refusal(site, _records(_study())) is WireCode.INTERNAL


def test_a_second_study_over_the_same_documents_embeds_candidates_only(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_weak.embedding_cache, "made_by", lambda *_: "the same")
    watched = _Watched(load_embedder(Voting()))
    monkeypatch.setattr(client_weak.client_app, "load_embedder", lambda *_: watched)
    assert _ask(site, _records(_study())).has_content()
    assert len(watched.seen) == len(TEXTS) + 60
    watched.seen.clear()
    assert _ask(site, _records(_study(similarity="l2"))).has_content()
    assert watched.seen == list(TEXTS)


def test_the_default_embedder_leaves_no_vectors_behind(site: Path) -> None:
    assert _ask(site, _records(_study())).has_content()
    assert not (Site.load(site).state / FILE).exists()
