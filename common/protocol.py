"""Every message between coordinator and site, with one function each way to Flower's RecordDict.

Three questions exist: the census (asks for nothing that depends on data), one training step of phase 1, and the
single vote of phase 2. Answers to the last two carry, byte for byte, what the site's door stored in its ledger.
Questions carry the head of the site's ledger that the coordinator saw last, and answers the head as it is now, so that
a ledger which was restored from an old copy is noticed. Texts travel as a uint8 Array: Flower cuts Arrays into chunks
but sends a ConfigRecord in one piece.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from common.configuration import NAME
from common.errors import ProtocolError, StudyError, UnknownProtocolError, WireCode
from common.study import Study

PROTOCOL_VERSION = 2

CENSUS = "query.census"
TRAIN = "train.lora"
PROFILE_AND_VOTE = "query.profile_and_vote"

_HEX = re.compile(r"[0-9a-f]{1,64}")

Adapter = Mapping[str, NDArray[np.float32]]
"""Adapter weights: parameter name -> array."""


@dataclass(frozen=True)
class LedgerHead:
    """Where a site's ledger stands. Tells how many events it has, never what is in them.

    Attributes
    ----------
    ledger
        The ledger's random name.
    sequence, hash
        Number and chain hash of its last event.
    """

    ledger: str
    sequence: int
    hash: str

    def to_record(self) -> ConfigRecord:
        """Encode for Flower."""
        return ConfigRecord({"ledger": self.ledger, "sequence": self.sequence, "hash": self.hash})

    @classmethod
    def from_records(cls, records: RecordDict, name: str) -> LedgerHead | None:
        """Decode record ``name``, or None if it isn't there. Raises ProtocolError."""
        record = records.config_records.get(name)
        if record is None:
            return None
        head = cls(_text(record, "ledger"), _number(record, "sequence"), _text(record, "hash"))
        if not (_HEX.fullmatch(head.ledger) and _HEX.fullmatch(head.hash)):
            raise ProtocolError(f"message: {name!r} isn't the head of a ledger; hexadecimal names are needed")
        return head


def addressed(records: RecordDict, seen: LedgerHead | None) -> RecordDict:
    """An encoded request for one site: the same records, and the head of its ledger that was seen last."""
    return RecordDict(dict(records.items()) | ({} if seen is None else {"seen": seen.to_record()}))


class Request(Protocol):
    """What the door needs to know of a question."""

    @property
    def study(self) -> Study:
        """The study the question belongs to."""

    @property
    def run_id(self) -> str:
        """The coordinator's name of the run."""

    @property
    def key(self) -> str:
        """What is asked, e.g. ``train/3``: with study and run it names one release for ever."""

    @property
    def digest(self) -> str:
        """SHA-256 of the question's whole content, in hexadecimal. What the coordinator has seen isn't part of it."""

    @property
    def seen(self) -> LedgerHead | None:
        """The head of this site's ledger that the coordinator saw last, if it saw one."""


@dataclass(frozen=True)
class CensusRequest:
    """Who are you, and do you accept this study?"""

    study: Study
    run_id: str
    seen: LedgerHead | None = None

    def to_records(self) -> RecordDict:
        """Encode for Flower."""
        return addressed(RecordDict({"request": _head(self.study, self.run_id)}), self.seen)

    @classmethod
    def from_records(cls, records: RecordDict) -> CensusRequest:
        """Decode; raises ProtocolError."""
        head = _read_head(records)
        return cls(_study(head), _text(head, "run-id"), LedgerHead.from_records(records, "seen"))


@dataclass(frozen=True)
class CensusReply:
    """A site's public facts. Nothing here depends on its documents."""

    name: str
    tier: Literal["strong", "weak"]
    size_class: int
    software: str
    study_sha256: str
    refusal: WireCode | None
    ledger: LedgerHead | None = None

    def to_records(self) -> RecordDict:
        """Encode for Flower."""
        records = RecordDict(
            {
                "reply": ConfigRecord(
                    {
                        "protocol": PROTOCOL_VERSION,
                        "name": self.name,
                        "tier": self.tier,
                        "size-class": self.size_class,
                        "software": self.software,
                        "study-sha256": self.study_sha256,
                        "refusal": 0 if self.refusal is None else int(self.refusal),
                    }
                )
            }
        )
        if self.ledger is not None:
            records["ledger"] = self.ledger.to_record()
        return records

    @classmethod
    def from_records(cls, records: RecordDict) -> CensusReply:
        """Decode; raises ProtocolError."""
        head = _read_head(records, "reply")
        tier = _text(head, "tier")
        if tier not in ("strong", "weak"):
            raise ProtocolError(f"census reply: tier is {tier!r}; 'strong' or 'weak' is accepted")
        name = _text(head, "name")
        if not re.fullmatch(NAME, name):
            raise ProtocolError("census reply: the site's name has other characters than letters, digits, . _ -")
        refusal = _number(head, "refusal")
        if refusal and refusal not in WireCode._value2member_map_:
            raise ProtocolError(f"census reply: refusal code {refusal} isn't known")
        return cls(
            name=name,
            tier="strong" if tier == "strong" else "weak",
            size_class=_number(head, "size-class"),
            software=_text(head, "software"),
            study_sha256=_text(head, "study-sha256"),
            refusal=WireCode(refusal) if refusal else None,
            ledger=LedgerHead.from_records(records, "ledger"),
        )


@dataclass(frozen=True)
class TrainRequest:
    """Run this round's DP-SGD steps from this adapter."""

    study: Study
    run_id: str
    round: int
    adapter: Adapter
    frozen_sha256: str
    """Digest of the part of the adapter that doesn't travel (FFA-LoRA's A); the site compares it with its own."""
    seen: LedgerHead | None = None

    @property
    def key(self) -> str:
        """``train/ROUND``."""
        return f"train/{self.round}"

    @property
    def digest(self) -> str:
        """SHA-256 over study, run, round and adapter."""
        return _digest(self.study, self.run_id, self.key, self.frozen_sha256.encode(), adapter_bytes(self.adapter))

    def to_records(self) -> RecordDict:
        """Encode for Flower."""
        head = _head(self.study, self.run_id, {"round": self.round, "frozen-sha256": self.frozen_sha256})
        arrays = ArrayRecord({name: Array(np.asarray(value, np.float32)) for name, value in self.adapter.items()})
        return addressed(RecordDict({"request": head, "adapter": arrays}), self.seen)

    @classmethod
    def from_records(cls, records: RecordDict) -> TrainRequest:
        """Decode; raises ProtocolError."""
        head = _read_head(records)
        round_ = _number(head, "round")
        study = _study(head)
        if not 1 <= round_ <= study.training.rounds:
            raise ProtocolError(f"train request: round is {round_}; 1 to {study.training.rounds} is accepted")
        adapter = _arrays(records, "adapter")
        _check_adapter("train request", adapter)
        seen = LedgerHead.from_records(records, "seen")
        return cls(study, _text(head, "run-id"), round_, adapter, _text(head, "frozen-sha256"), seen)


@dataclass(frozen=True)
class CandidatePool:
    """Synthetic texts, each under one code. Public to every site of the study.

    Attributes
    ----------
    texts
        One text per candidate.
    codes
        Code index of each candidate, int32 of shape ``(candidates,)``.
    """

    texts: tuple[str, ...]
    codes: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class VoteRequest:
    """Profile your documents and vote on this pool."""

    study: Study
    run_id: str
    pool: CandidatePool
    seen: LedgerHead | None = None

    @property
    def key(self) -> str:
        """``profile-and-vote``: there is one such release in a run."""
        return "profile-and-vote"

    @property
    def digest(self) -> str:
        """SHA-256 over study, run and pool."""
        texts = _pack_texts(self.pool.texts).tobytes()
        return _digest(self.study, self.run_id, self.key, texts, np.asarray(self.pool.codes, "<i4").tobytes())

    def to_records(self) -> RecordDict:
        """Encode for Flower."""
        pool = {
            "texts": Array(_pack_texts(self.pool.texts)),
            "codes": Array(np.asarray(self.pool.codes, np.int32)),
        }
        records = RecordDict({"request": _head(self.study, self.run_id), "pool": ArrayRecord(pool)})
        return addressed(records, self.seen)

    @classmethod
    def from_records(cls, records: RecordDict) -> VoteRequest:
        """Decode; raises ProtocolError."""
        head = _read_head(records)
        arrays = _arrays(records, "pool")
        if set(arrays) != {"texts", "codes"}:
            raise ProtocolError(f"vote request: pool holds {sorted(arrays)}; 'codes' and 'texts' are accepted")
        study = _study(head)
        codes = arrays["codes"]
        _check_pool_size(study, arrays["texts"], codes)
        texts = _unpack_texts(arrays["texts"])
        if codes.dtype != np.int32 or codes.shape != (len(texts),):
            raise ProtocolError(f"vote request: {len(texts)} texts but codes are {codes.dtype} {codes.shape}")
        if codes.size and not (codes.min() >= 0 and codes.max() < len(study.codes)):
            raise ProtocolError(f"vote request: a candidate's code is outside 0 to {len(study.codes) - 1}")
        seen = LedgerHead.from_records(records, "seen")
        return cls(study, _text(head, "run-id"), CandidatePool(texts, codes), seen)


@dataclass(frozen=True)
class TrainReply:
    """A strong site's noisy adapter and, with its first reply, its noisy profile. Already noised."""

    adapter: Adapter
    profile: NDArray[np.int64] | None
    ledger: LedgerHead | None = None

    @classmethod
    def from_records(cls, records: RecordDict, codes: int) -> TrainReply:
        """Decode; ``codes`` is the length a profile must have. Raises ProtocolError."""
        arrays = unpack_release(_release_bytes(records))
        profile = arrays.pop("profile", None)
        adapter = {}
        for name, value in arrays.items():
            if not name.startswith("adapter/"):
                raise ProtocolError(f"train reply: unexpected array {name!r}")
            adapter[name.removeprefix("adapter/")] = value
        _check_adapter("train reply", adapter)
        if profile is not None:
            _check_counts("train reply: profile", profile, codes)
        return cls(adapter, profile, LedgerHead.from_records(records, "ledger"))


@dataclass(frozen=True)
class VoteReply:
    """A weak site's noisy profile, int64 ``(codes,)``, and ballot, int64 ``(candidates,)``. Already noised."""

    profile: NDArray[np.int64]
    ballot: NDArray[np.int64]
    ledger: LedgerHead | None = None

    @classmethod
    def from_records(cls, records: RecordDict, codes: int, candidates: int) -> VoteReply:
        """Decode; raises ProtocolError."""
        arrays = unpack_release(_release_bytes(records))
        if set(arrays) != {"profile", "ballot"}:
            raise ProtocolError(f"vote reply: holds {sorted(arrays)}; 'ballot' and 'profile' are accepted")
        _check_counts("vote reply: profile", arrays["profile"], codes)
        _check_counts("vote reply: ballot", arrays["ballot"], candidates)
        return cls(arrays["profile"], arrays["ballot"], LedgerHead.from_records(records, "ledger"))


def release_records(stored: bytes, ledger: LedgerHead) -> RecordDict:
    """Wrap the bytes that a door stored for the wire, beside the head of its ledger."""
    release = ArrayRecord({"bytes": Array(np.frombuffer(stored, dtype=np.uint8))})
    return RecordDict({"release": release, "ledger": ledger.to_record()})


def pack_release(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Arrays -> bytes (npz, no pickle)."""
    if pickled := [name for name, value in arrays.items() if value.dtype.hasobject]:
        raise ProtocolError(f"release: {pickled[0]!r} holds Python objects; only numbers are released")
    buffer = io.BytesIO()
    members: dict[str, Any] = {name.replace("/", "|"): value for name, value in arrays.items()}
    np.savez(buffer, **members)
    return buffer.getvalue()


def unpack_release(data: bytes) -> dict[str, NDArray[Any]]:
    """Inverse of `pack_release`; raises ProtocolError on anything else."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            arrays = {name.replace("|", "/"): archive[name] for name in archive.files}
    except Exception as cause:
        # Hostile bytes make numpy and zipfile raise nearly anything: zlib.error, NotImplementedError, ...
        raise ProtocolError("release: the bytes aren't an array archive") from cause
    for name, value in arrays.items():
        if not isinstance(value, np.ndarray):
            raise ProtocolError(f"release: {name!r} isn't an array")
    return arrays


def adapter_bytes(adapter: Adapter) -> bytes:
    """Deterministic bytes of an adapter, for hashing: names in order, shapes and little-endian float32 values.

    Every name carries its length, so no two adapters have the same bytes.
    """
    parts = []
    for name in sorted(adapter):
        value = np.ascontiguousarray(adapter[name], dtype="<f4")
        header = json.dumps([name, *value.shape]).encode()
        parts.append(len(header).to_bytes(8, "big") + header + value.tobytes())
    return b"".join(parts)


def _head(study: Study, run_id: str, more: Mapping[str, int | str] | None = None) -> ConfigRecord:
    return ConfigRecord({"protocol": PROTOCOL_VERSION, "study": study.canonical, "run-id": run_id} | dict(more or {}))


def _read_head(records: RecordDict, name: str = "request") -> Mapping[str, Any]:
    head = records.config_records.get(name)
    if head is None:
        raise ProtocolError(f"message: record {name!r} is missing")
    version = head.get("protocol")
    if version != PROTOCOL_VERSION:
        raise UnknownProtocolError(
            f"message: protocol version {version!r} isn't spoken here; this install speaks {PROTOCOL_VERSION}"
        )
    return head


def _study(head: Mapping[str, Any]) -> Study:
    try:
        return Study.from_canonical(_text(head, "study"))
    except StudyError as cause:
        raise ProtocolError(f"message: {cause}") from cause


def _text(head: Mapping[str, Any], key: str) -> str:
    value = head.get(key)
    if not isinstance(value, str) or not value:
        raise ProtocolError(f"message: {key!r} is {value!r}; a text is needed")
    return value


def _number(head: Mapping[str, Any], key: str) -> int:
    value = head.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not value >= 0:
        raise ProtocolError(f"message: {key!r} is {value!r}; a whole number of at least 0 is needed")
    return value


def _arrays(records: RecordDict, name: str) -> dict[str, NDArray[Any]]:
    record = records.array_records.get(name)
    if record is None:
        raise ProtocolError(f"message: record {name!r} is missing")
    return {key: _array(key, array) for key, array in record.items()}


def _array(name: str, array: Array) -> NDArray[Any]:
    try:
        value = array.numpy()
    except Exception as cause:
        # Flower hands the bytes to numpy as they came; what hostile ones make it raise is nearly anything.
        raise ProtocolError(f"message: {name!r} can't be read as an array") from cause
    if not isinstance(value, np.ndarray):
        raise ProtocolError(f"message: {name!r} isn't an array")
    return value


def _release_bytes(records: RecordDict) -> bytes:
    arrays = _arrays(records, "release")
    if "bytes" not in arrays:
        raise ProtocolError("reply: the release holds no bytes")
    return arrays["bytes"].tobytes()


def _pack_texts(texts: tuple[str, ...]) -> NDArray[np.uint8]:
    lines = "\n".join(json.dumps(text, ensure_ascii=False) for text in texts)
    return np.frombuffer(lines.encode("utf-8", "surrogatepass"), dtype=np.uint8)


def _check_pool_size(study: Study, packed: NDArray[np.uint8], codes: NDArray[Any]) -> None:
    """Refuse a pool larger than its study's before any of its texts is made."""
    lines = int(np.count_nonzero(packed == ord("\n"))) + 1 if packed.size else 0
    if max(lines, codes.size) > study.pool.size:
        raise ProtocolError(
            f"vote request: {max(lines, codes.size)} candidates; the study's pool.size allows {study.pool.size}"
        )


def _unpack_texts(packed: NDArray[np.uint8]) -> tuple[str, ...]:
    if packed.dtype != np.uint8 or packed.ndim != 1:
        raise ProtocolError(f"vote request: texts are {packed.dtype} {packed.shape}; a flat uint8 array is needed")
    if not packed.size:
        return ()
    try:
        texts = tuple(json.loads(line) for line in packed.tobytes().decode("utf-8", "surrogatepass").split("\n"))
    except (ValueError, RecursionError) as cause:
        raise ProtocolError("vote request: the packed texts aren't JSON lines") from cause
    if not all(isinstance(text, str) for text in texts):
        raise ProtocolError("vote request: a packed text isn't a string")
    return texts


def _check_adapter(what: str, adapter: Mapping[str, NDArray[Any]]) -> None:
    for name, value in adapter.items():
        if value.dtype != np.float32:
            raise ProtocolError(f"{what}: {name!r} is {value.dtype}; float32 is needed")


def _check_counts(what: str, counts: NDArray[Any], length: int) -> None:
    if counts.dtype != np.int64 or counts.shape != (length,):
        raise ProtocolError(f"{what} is {counts.dtype} {counts.shape}; int64 ({length},) is needed")


def _digest(study: Study, run_id: str, key: str, *parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in (study.canonical.encode(), run_id.encode(), key.encode(), *parts):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()
