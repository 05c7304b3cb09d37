"""Messages: what goes in comes out, and whatever else arrives is a ProtocolError, never another exception."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ProtocolError, UnknownProtocolError, WireCode
from common.protocol import (
    PROTOCOL_VERSION,
    CandidatePool,
    CensusReply,
    CensusRequest,
    LedgerHead,
    TrainReply,
    TrainRequest,
    VoteReply,
    VoteRequest,
    adapter_bytes,
    addressed,
    pack_release,
    release_records,
    unpack_release,
)
from common.study import Study

STUDY = Study.model_validate(
    {
        "name": "test",
        "codes": {"attributes": [{"name": "topic", "values": ["Staff", "Food"]}]},
        "privacy": {"epsilon": 4, "delta": 1e-5},
        "generator": {"base": "tiny"},
        "training": {"rounds": 3},
    }
)
OTHER_STUDY = STUDY.model_copy(update={"name": "other"})
ADAPTER = {
    "layer.a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "layer.b": np.zeros((1,), dtype=np.float32),
}
POOL = CandidatePool(("Good.", 'Line\nbreak, "quote", Grüße, 😀', ""), np.array([0, 1, 1], dtype=np.int32))
HEAD = LedgerHead("a" * 32, 7, "b" * 64)
CENSUS = CensusRequest(STUDY, "run-1", HEAD)
TRAIN = TrainRequest(STUDY, "run-1", 2, ADAPTER, "f" * 64, HEAD)
VOTE = VoteRequest(STUDY, "run-1", POOL, HEAD)
CENSUS_REPLY = CensusReply("hospital", "weak", 100, "1.42.0", STUDY.sha256, None, HEAD)

DECODERS: dict[str, Callable[[RecordDict], Any]] = {
    "census request": CensusRequest.from_records,
    "census reply": CensusReply.from_records,
    "train request": TrainRequest.from_records,
    "vote request": VoteRequest.from_records,
    "train reply": lambda records: TrainReply.from_records(records, codes=2),
    "vote reply": lambda records: VoteReply.from_records(records, codes=2, candidates=3),
}


def train_reply(**arrays: Any) -> RecordDict:
    return release_records(pack_release({f"adapter/{k}": v for k, v in ADAPTER.items()} | arrays), HEAD)


def vote_reply(**arrays: Any) -> RecordDict:
    counts = {"profile": np.array([3, -1]), "ballot": np.array([1, 0, -2])}
    return release_records(pack_release(counts | arrays), HEAD)


VALID: dict[str, Callable[[], RecordDict]] = {
    "census request": CENSUS.to_records,
    "census reply": CENSUS_REPLY.to_records,
    "train request": TRAIN.to_records,
    "vote request": VOTE.to_records,
    "train reply": train_reply,
    "vote reply": vote_reply,
}


def sent(records: RecordDict) -> RecordDict:
    """The records after Flower's own way over the wire."""
    from flwr.common.serde import recorddict_from_proto, recorddict_to_proto

    return recorddict_from_proto(recorddict_to_proto(records))


def same_adapter(one: Any, other: Any) -> bool:
    return list(one) == list(other) and all(
        one[k].dtype == other[k].dtype and np.array_equal(one[k], other[k]) for k in one
    )


def test_census_request_comes_back_as_it_was_sent() -> None:
    assert CensusRequest.from_records(sent(CENSUS.to_records())) == CENSUS


@pytest.mark.parametrize("refusal", [None, *WireCode])
@pytest.mark.parametrize("tier", ["strong", "weak"])
def test_census_reply_comes_back_as_it_was_sent(refusal: WireCode | None, tier: Any) -> None:
    reply = replace(CENSUS_REPLY, tier=tier, refusal=refusal)
    assert CensusReply.from_records(sent(reply.to_records())) == reply


@pytest.mark.parametrize("request_", [CENSUS, TRAIN, VOTE])
def test_a_question_carries_the_ledger_head_that_was_seen_and_is_the_same_question_without(request_: Any) -> None:
    decode = type(request_).from_records
    unseen = replace(request_, seen=None)
    assert decode(sent(request_.to_records())).seen == HEAD
    assert decode(sent(unseen.to_records())).seen is None
    assert decode(sent(addressed(unseen.to_records(), HEAD))).seen == HEAD
    if request_ is not CENSUS:
        assert request_.digest == unseen.digest


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"ledger": "a", "sequence": 1},
        {"ledger": "a", "sequence": -1, "hash": "b"},
        {"ledger": "a", "sequence": True, "hash": "b"},
        {"ledger": 3, "sequence": 1, "hash": "b"},
        {"ledger": "../a", "sequence": 1, "hash": "b"},
        {"ledger": "a", "sequence": 1, "hash": "B" * 65},
    ],
)
def test_a_ledger_head_that_is_none_is_refused(record: dict[str, Any]) -> None:
    for records, decode, name in (
        (VALID["vote request"](), DECODERS["vote request"], "seen"),
        (VALID["vote reply"](), DECODERS["vote reply"], "ledger"),
        (VALID["census reply"](), DECODERS["census reply"], "ledger"),
    ):
        records[name] = ConfigRecord(record)
        with pytest.raises(ProtocolError):
            decode(records)


def test_train_request_comes_back_as_it_was_sent() -> None:
    again = TrainRequest.from_records(sent(TRAIN.to_records()))
    assert (again.study, again.run_id, again.round, again.frozen_sha256) == (STUDY, "run-1", 2, "f" * 64)
    assert same_adapter(again.adapter, ADAPTER)
    assert (again.digest, again.key) == (TRAIN.digest, "train/2")


@settings(deadline=None)
@given(st.lists(st.tuples(st.text(st.characters(), max_size=20), st.integers(0, 1)), max_size=8))
def test_vote_request_comes_back_as_it_was_sent(candidates: list[tuple[str, int]]) -> None:
    texts = tuple(text for text, _ in candidates)
    request = VoteRequest(STUDY, "run-1", CandidatePool(texts, np.array([c for _, c in candidates], dtype=np.int32)))
    again = VoteRequest.from_records(sent(request.to_records()))
    assert again.pool.texts == texts
    assert again.pool.codes.tolist() == request.pool.codes.tolist()
    assert (again.study, again.run_id, again.digest) == (STUDY, "run-1", request.digest)


@pytest.mark.parametrize("profile", [None, np.array([5, -3], dtype=np.int64)])
def test_train_reply_comes_back_as_it_was_stored(profile: Any) -> None:
    records = train_reply() if profile is None else train_reply(profile=profile)
    reply = TrainReply.from_records(sent(records), codes=2)
    assert same_adapter(reply.adapter, ADAPTER)
    assert np.array_equal(reply.profile, profile) if profile is not None else reply.profile is None


def test_vote_reply_comes_back_as_it_was_stored() -> None:
    reply = VoteReply.from_records(sent(vote_reply()), codes=2, candidates=3)
    assert (reply.profile.tolist(), reply.ballot.tolist()) == ([3, -1], [1, 0, -2])


def test_stored_bytes_travel_unchanged() -> None:
    stored = pack_release({"profile": np.array([1, 2])})
    assert sent(release_records(stored, HEAD)).array_records["release"]["bytes"].numpy().tobytes() == stored


def test_same_release_packs_to_the_same_bytes() -> None:
    arrays = {"adapter/x": np.ones(3, np.float32), "profile": np.arange(2)}
    assert pack_release(arrays) == pack_release(arrays)
    assert set(unpack_release(pack_release(arrays))) == set(arrays)


def test_release_of_python_objects_is_refused() -> None:
    with pytest.raises(ProtocolError, match="'profile' holds Python objects"):
        pack_release({"profile": np.array([{}], dtype=object)})


# What the digest covers: the ledger answers an old id with old bytes only if nothing of the question changed.


def test_digest_changes_with_everything_in_a_train_request() -> None:
    bumped = {k: v.copy() for k, v in ADAPTER.items()}
    bumped["layer.a"][1, 2] = np.nextafter(bumped["layer.a"][1, 2], np.float32(9))
    changed = [
        replace(TRAIN, study=OTHER_STUDY),
        replace(TRAIN, run_id="run-2"),
        replace(TRAIN, round=3),
        replace(TRAIN, frozen_sha256="e" * 64),
        replace(TRAIN, adapter=bumped),
        replace(TRAIN, adapter={"layer.a": ADAPTER["layer.a"]}),
        replace(TRAIN, adapter=ADAPTER | {"layer.c": ADAPTER["layer.b"]}),
        replace(TRAIN, adapter={"layer.A": ADAPTER["layer.a"], "layer.b": ADAPTER["layer.b"]}),
        replace(TRAIN, adapter=ADAPTER | {"layer.a": ADAPTER["layer.a"].reshape(3, 2)}),
        replace(TRAIN, adapter=ADAPTER | {"layer.b": np.array([-0.0], np.float32)}),
    ]
    digests = [request.digest for request in (TRAIN, *changed)]
    assert len(set(digests)) == len(digests)
    reordered = dict(reversed(ADAPTER.items()))
    assert replace(TRAIN, adapter=reordered).digest == TRAIN.digest


def test_digest_changes_with_everything_in_a_vote_request() -> None:
    first, *rest = POOL.texts
    changed = [
        replace(VOTE, study=OTHER_STUDY),
        replace(VOTE, run_id="run-2"),
        replace(VOTE, pool=replace(POOL, codes=np.array([1, 1, 1], np.int32))),
        replace(VOTE, pool=replace(POOL, texts=(first + " ", *rest))),
        replace(VOTE, pool=replace(POOL, texts=(*rest, first))),
        replace(VOTE, pool=CandidatePool(POOL.texts[:2], POOL.codes[:2])),
    ]
    digests = [request.digest for request in (VOTE, *changed)]
    assert len(set(digests)) == len(digests)


def test_name_of_a_weight_cannot_pass_for_its_shape_or_values() -> None:
    """Without a length before every name, these two adapters have the same bytes."""
    tail = np.frombuffer(b"xabc(1,)\x00\x00\x00\x00", dtype="<f4")
    one = {"w(1,)": tail}
    other = {
        "w": np.frombuffer(b"(3,)", dtype="<f4"),
        "xabc": np.zeros(1, dtype=np.float32),
    }
    unframed = [b"".join(f"{n}{a[n].shape}".encode() + a[n].tobytes() for n in sorted(a)) for a in (one, other)]
    assert unframed[0] == unframed[1]
    assert adapter_bytes(one) != adapter_bytes(other)


# What a stranger may send.


def with_head(records: RecordDict, key: str, value: Any) -> RecordDict:
    name = "request" if "request" in records else "reply"
    head = dict(records.config_records[name])
    head.pop(key, None)
    return RecordDict(dict(records) | {name: ConfigRecord(head if value is None else head | {key: value})})


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, "1", None, b"1", [1]])
@pytest.mark.parametrize("kind", ["census request", "census reply", "train request", "vote request"])
def test_unknown_version_has_an_error_of_its_own(kind: str, version: Any) -> None:
    with pytest.raises(UnknownProtocolError) as caught:
        DECODERS[kind](with_head(VALID[kind](), "protocol", version))
    assert caught.value.wire_code == WireCode.UNKNOWN_PROTOCOL
    assert f"this install speaks {PROTOCOL_VERSION}" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "key", "values"),
    [
        ("census request", "study", [None, "", "{}", "not json", 5, "\ud800"]),
        ("census request", "run-id", [None, "", 5, b"x"]),
        ("census reply", "tier", [None, "medium", 1]),
        ("census reply", "name", [None, "", 3]),
        ("census reply", "size-class", [None, -1, "100", 1.0, True]),
        ("census reply", "refusal", [None, 7, -1, "1001"]),
        ("train request", "round", [None, 0, 4, -1, "1", 10**12, True]),
        ("train request", "frozen-sha256", [None, "", 1]),
        ("vote request", "study", ["[]", json.dumps({"name": "x"})]),
    ],
)
def test_wrong_field_is_a_protocol_error(kind: str, key: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ProtocolError):
            DECODERS[kind](with_head(VALID[kind](), key, value))


@pytest.mark.parametrize("kind", sorted(DECODERS))
def test_missing_record_is_a_protocol_error(kind: str) -> None:
    complete = dict(VALID[kind]())
    # A coordinator that saw no ledger yet, and a site that can't open its own, send no head.
    for name in set(complete) - {"seen", "ledger"}:
        with pytest.raises(ProtocolError):
            DECODERS[kind](RecordDict({other: complete[other] for other in complete if other != name}))
    with pytest.raises(ProtocolError):
        DECODERS[kind](
            RecordDict({name: ConfigRecord({"protocol": PROTOCOL_VERSION}) for name in ("release", "request", "reply")})
        )


@pytest.mark.parametrize(
    "records",
    [
        train_reply(other=np.zeros(2)),
        train_reply(profile=np.zeros(2)),
        train_reply(profile=np.zeros(3, dtype=np.int64)),
        train_reply(**{"adapter/x": np.zeros(2)}),
        train_reply(**{"adapter/x": np.array(["text"])}),
    ],
)
def test_train_reply_of_another_shape_is_a_protocol_error(records: RecordDict) -> None:
    with pytest.raises(ProtocolError):
        TrainReply.from_records(records, codes=2)


@pytest.mark.parametrize(
    "records",
    [
        vote_reply(extra=np.zeros(2)),
        vote_reply(ballot=np.zeros(3)),
        vote_reply(ballot=np.zeros((3, 1), dtype=np.int64)),
        vote_reply(profile=np.zeros(3, dtype=np.int64)),
        release_records(pack_release({"profile": np.array([1, 2])}), HEAD),
    ],
)
def test_vote_reply_of_another_shape_is_a_protocol_error(records: RecordDict) -> None:
    with pytest.raises(ProtocolError):
        VoteReply.from_records(records, codes=2, candidates=3)


def pool_records(texts: Any, codes: Any) -> RecordDict:
    records = VOTE.to_records()
    records["pool"] = ArrayRecord({"texts": Array(np.asarray(texts)), "codes": Array(np.asarray(codes))})
    return records


def packed(text: str) -> Any:
    return np.frombuffer(text.encode(), dtype=np.uint8)


@pytest.mark.parametrize(
    ("texts", "codes"),
    [
        (packed('"a"'), np.array([2], np.int32)),
        (packed('"a"'), np.array([-1], np.int32)),
        (packed('"a"'), np.array([0], np.int64)),
        (packed('"a"'), np.array([[0]], np.int32)),
        (packed('"a"\n"b"'), np.array([0], np.int32)),
        (packed("5"), np.array([0], np.int32)),
        (packed("a"), np.array([0], np.int32)),
        (packed("[" * 100_000), np.array([0], np.int32)),
        (packed('"a"').reshape(1, 3), np.array([0], np.int32)),
        (packed('"a"').astype(np.int32), np.array([0], np.int32)),
        (np.array([255, 254], np.uint8), np.array([0], np.int32)),
    ],
)
def test_pool_that_does_not_fit_together_is_a_protocol_error(texts: Any, codes: Any) -> None:
    with pytest.raises(ProtocolError):
        VoteRequest.from_records(pool_records(texts, codes))


@pytest.mark.parametrize("dtype", [np.float64, np.int32, "U4"])
def test_adapter_of_another_number_format_is_a_protocol_error(dtype: Any) -> None:
    records = TRAIN.to_records()
    records["adapter"] = ArrayRecord({"layer.a": Array(np.zeros(2, dtype=dtype))})
    with pytest.raises(ProtocolError, match="float32 is needed"):
        TrainRequest.from_records(records)


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a message was unpickled",))


def npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def archive(*members: tuple[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as file:
        for name, data in members:
            file.writestr(name, data)
    return stream.getvalue()


DEFLATED = archive(("profile.npy", npy(np.zeros(99))), compression=zipfile.ZIP_DEFLATED)
HOSTILE_BYTES = [
    b"",
    b"PK\x03\x04",
    pickle.dumps(_Bomb()),
    npy(np.zeros(2)),
    npy(np.array([_Bomb()], dtype=object)),
    npy(np.zeros(2))[:-4],
    npy(np.zeros(2)).replace(b"(2,)", b"(2((")[:100],
    npy(np.zeros(2)).replace(b"'shape'", b"'shame'"),
    archive(("profile.npy", npy(np.array([_Bomb()], dtype=object)))),
    archive(("profile.npy", b"no array")),
    archive(("profile.txt", b"no array")),
    archive(),
    pack_release({"profile": np.zeros(2)})[:-30],
    DEFLATED.replace(DEFLATED[50:60], b"\xff" * 10),
    DEFLATED.replace(b"\x08\x00", b"\x63\x00"),
]


@pytest.mark.parametrize("data", HOSTILE_BYTES, ids=range(len(HOSTILE_BYTES)))
def test_hostile_bytes_are_a_protocol_error_and_are_never_unpickled(data: bytes) -> None:
    array = Array(dtype="float32", shape=(2,), stype="numpy.ndarray", data=data)
    for kind, records in (
        ("vote reply", release_records(data or b"\x00", HEAD)),
        ("train reply", RecordDict({"release": ArrayRecord({"bytes": array})})),
        (
            "vote request",
            RecordDict(dict(VOTE.to_records()) | {"pool": ArrayRecord({"texts": array, "codes": array})}),
        ),
    ):
        with pytest.raises(ProtocolError):
            DECODERS[kind](records)
    with contextlib.suppress(ProtocolError):
        # A zip archive without members is a release of nothing.
        assert unpack_release(data) == {}


def test_array_of_an_unknown_serialisation_is_a_protocol_error() -> None:
    records = TRAIN.to_records()
    records["adapter"] = ArrayRecord({"x": Array(dtype="float32", shape=(1,), stype="torch", data=npy(np.zeros(1)))})
    with pytest.raises(ProtocolError):
        TrainRequest.from_records(records)


SCALARS = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.booleans(),
    st.lists(st.integers(0, 9), max_size=3),
    st.just(STUDY.canonical),
    st.just(PROTOCOL_VERSION),
)
HEAD_KEYS = ["protocol", "study", "run-id", "round", "frozen-sha256", "tier", "name", "size-class", "refusal"]
CONFIGS = st.dictionaries(st.sampled_from(HEAD_KEYS), SCALARS).map(
    lambda values: ConfigRecord({"protocol": PROTOCOL_VERSION, "study": STUDY.canonical, "run-id": "r"} | values)
)
ARRAYS = st.builds(
    lambda data, stype: Array(dtype="uint8", shape=(1,), stype=stype, data=data),
    st.one_of(
        st.binary(max_size=60),
        st.sampled_from(HOSTILE_BYTES),
        st.sampled_from([npy(np.zeros(2, dtype)) for dtype in ("u1", "i4", "i8", "f4", "f8", "U1", "c8")]),
    ),
    st.sampled_from(["numpy.ndarray", "numpy.ndarray", "other"]),
)
ARRAY_RECORDS = st.dictionaries(st.sampled_from(["texts", "codes", "bytes", "layer.a"]), ARRAYS).map(ArrayRecord)
RECORDS = st.dictionaries(
    st.sampled_from(["request", "reply", "adapter", "pool", "release"]), CONFIGS | ARRAY_RECORDS, max_size=5
).map(RecordDict)


@settings(max_examples=300, deadline=None)
@given(RECORDS, st.sampled_from(sorted(DECODERS)))
def test_whatever_arrives_is_decoded_or_a_protocol_error(records: RecordDict, kind: str) -> None:
    with contextlib.suppress(ProtocolError):
        DECODERS[kind](records)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(VALID)), st.integers(0, 10**6), st.integers(1, 255))
def test_one_changed_byte_of_an_array_is_decoded_or_a_protocol_error(kind: str, place: int, flip: int) -> None:
    records = VALID[kind]()
    for record in records.array_records.values():
        for name, array in record.items():
            data = bytearray(array.data)
            data[place % len(data)] ^= flip
            record[name] = Array(dtype=array.dtype, shape=array.shape, stype=array.stype, data=bytes(data))
    with contextlib.suppress(ProtocolError):
        DECODERS[kind](records)
