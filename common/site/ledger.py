"""The ledger: a site's durable, append-only record of every release and what it cost.

One chain of events, each carrying the hash of the one before it:

    opened        the ledger's own random name
    asked         a study that waits for a person of this site
    decision      a person agreed to a study, or declined it
    reservation   a run's whole plan is charged, before its first release is computed
    release       a question was answered: its digest, the parts of the plan that this spent, the hash of the bytes
    closed        a person ended a run at this site: it gets no further release

The noised bytes themselves lie in a second table, so that an auditor gets every event and no bytes. A third holds what
a run's last release kept for its next one, noised as well; it is replaced. Nothing exact is ever written here. Triggers
refuse updates and deletes; the chain betrays what went around them; and a copy that was restored from a backup is
betrayed by the coordinator, which tells the site the last head it saw.

Spent counts from the reservation, and closing a run refunds no epsilon: how far a run got may depend on what it gave
out, and the epsilon of a plan that was stopped in view of its outputs is the whole plan's. A Renyi filter alone may
count what was given out, as it holds for any choice made on the way (Feldman & Zrnic 2021).

A site that sets a key has contents and bytes encrypted.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import secrets
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from common.errors import ConflictError, LedgerError, LedgerRestoredError, PolicyRefusal
from common.privacy.accounting import (
    VERIFY_INTERVAL,
    Mechanism,
    PrivacyPlan,
    SubsampledGaussian,
    describe,
    described,
)
from common.protocol import LedgerHead
from common.site.config import Policy, Site
from common.site.files import create_private
from common.site.policy import Charge, check_lifetime
from common.study import Study

FORMAT = 2
"""Version of the events; an export carries it."""

MOST_PENDING = 100
"""Studies that may wait for a decision at once."""

Verdict = Literal["approved", "declined"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS event (
    sequence INTEGER PRIMARY KEY, kind TEXT NOT NULL, identity TEXT NOT NULL UNIQUE, content BLOB NOT NULL,
    previous TEXT NOT NULL, hash TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS blob (identity TEXT PRIMARY KEY REFERENCES event (identity), bytes BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS kept (run TEXT PRIMARY KEY, bytes BLOB NOT NULL);
"""
_APPEND_ONLY = "".join(
    f"CREATE TRIGGER IF NOT EXISTS {table}_no_{verb} BEFORE {verb} ON {table} "
    f"BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;\n"
    for table in ("event", "blob")
    for verb in ("UPDATE", "DELETE")
)


@dataclass(frozen=True)
class Event:
    """One row of the ledger."""

    sequence: int
    kind: str
    content: Mapping[str, Any]
    previous: str
    hash: str


class Ledger:
    """One site's ledger file. Releases are made inside `Ledger.exclusive`: one at a time.

    Parameters
    ----------
    path
        The file; made if it isn't there.
    key
        32 bytes, or None for a ledger in the clear.

    Raises
    ------
    LedgerError
        If the file can't be read or written, its hash chain is broken, or the key isn't its own. Then nothing is
        released.
    """

    def __init__(self, path: Path, key: bytes | None = None) -> None:
        self._path = path
        self._seal = _Seal(path, key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            create_private(path)
            self._database = sqlite3.connect(path, isolation_level=None, timeout=60)
        except (sqlite3.Error, OSError) as cause:
            raise LedgerError(f"{path}: the ledger can't be opened: {cause}") from cause
        try:
            for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
                self._database.execute(f"PRAGMA {pragma}")
            self._refuse_other_tables()
            self._database.executescript(_SCHEMA + _APPEND_ONLY)
            self._name_it()
            self.verify()
        except sqlite3.Error as cause:
            self._database.close()
            raise LedgerError(f"{path}: the ledger can't be opened: {cause}") from cause
        except BaseException:
            self._database.close()
            raise

    @classmethod
    def of(cls, site: Site) -> Ledger:
        """The ledger of a site. Raises as the constructor does."""
        return cls(site.ledger_path, site.ledger_key())

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def exclusive(self) -> Iterator[Ledger]:
        """Hold the site's one lock: from looking a request up until its answer is stored."""
        lock_path = self._path.with_suffix(".lock")
        try:
            create_private(lock_path)
            lock = lock_path.open("r+")
        except OSError as cause:
            raise LedgerError(f"{lock_path}: the ledger's lock can't be opened: {cause}") from cause
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield self

    def head(self) -> LedgerHead:
        """Where the chain stands now."""
        first, last = self._one("sequence = 1"), self._one("sequence = (SELECT MAX(sequence) FROM event)")
        if first is None or last is None:
            raise LedgerError(f"{self._path}: the ledger is empty; its first event is missing")
        return LedgerHead(str(first.content["ledger"]), last.sequence, last.hash)

    def check_not_restored(self, seen: LedgerHead | None) -> None:
        """Refuse to go on from an older copy than the one that the coordinator saw.

        Raises
        ------
        LedgerRestoredError
        """
        if seen is None:
            return
        own = self.head()
        if seen.ledger != own.ledger:
            raise LedgerRestoredError(
                f"{self._path}: is ledger {own.ledger[:12]}…, but the coordinator saw {seen.ledger[:12]}… at this "
                "site; it was deleted or replaced, and what was spent is unknown"
            )
        event = self._one("sequence = ?", seen.sequence)
        if event is None or event.hash != seen.hash:
            raise LedgerRestoredError(
                f"{self._path}: stands at event {own.sequence}, but the coordinator saw another event "
                f"{seen.sequence}; it was restored from an old copy, and what was spent since is unknown"
            )

    def charges(self, assets: Sequence[str]) -> list[Charge]:
        """What was charged on data that ``assets`` overlap with. No asset named means all data of the site."""
        return [
            Charge(c["epsilon"], c["delta"], tuple(self._mechanisms(c)))
            for c in self.runs()
            if _overlap(assets, c["assets"])
        ]

    def spent(self, assets: Sequence[str] = ()) -> tuple[float, float]:
        """(epsilon, delta) charged so far on overlapping data, added up."""
        charges = self.charges(assets)
        return sum(charge.epsilon for charge in charges), sum(charge.delta for charge in charges)

    def reservation(self, site: str, study: str, run: str) -> Mapping[str, Any] | None:
        """What a run was charged, or None."""
        event = self._by_identity("reservation", site, study, run)
        return None if event is None else event.content

    def stored(self, site: str, study: str, run: str, key: str, digest: str) -> bytes | None:
        """The bytes that answered this request before, or None.

        Raises
        ------
        ConflictError
            If the key was answered for a question with other content.
        LedgerError
            If the bytes aren't those that were stored.
        """
        event = self._by_identity("release", site, study, run, key)
        if event is None:
            return None
        if event.content["digest"] != digest:
            raise ConflictError(
                f"{self._path}: {key!r} of run {run!r} was answered for a question with digest "
                f"{event.content['digest'][:12]}…; this one has {digest[:12]}…, and an answer is given once"
            )
        rows = self._all(
            "SELECT bytes FROM blob WHERE identity = ?", self._seal.identity("release", site, study, run, key)
        )
        stored = self._seal.open(rows[0][0], event.sequence) if rows else b""
        if _sha256(stored) != event.content["sha256"]:
            raise LedgerError(f"{self._path}: the bytes of release {event.sequence} were changed; nothing is released")
        return stored

    def unspent(self, site: str, study: str, run: str, parts: Sequence[str]) -> list[str]:
        """Those of ``parts`` that the run hasn't given out yet."""
        spent = self._spent(site, study, run)
        return [part for part in parts if part not in spent]

    def kept(self, site: str, study: str, run: str) -> bytes:
        """What the last release of a run kept for its next one; empty if there is nothing.

        Raises
        ------
        LedgerError
            If it isn't what that release kept.
        """
        releases = self._releases(site, study, run)
        if not releases or "kept" not in releases[-1].content:
            return b""
        last = releases[-1]
        rows = self._all("SELECT bytes FROM kept WHERE run = ?", self._seal.identity("kept", site, study, run))
        kept = self._seal.open(rows[0][0], last.sequence) if rows else b""
        if _sha256(kept) != last.content["kept"]:
            raise LedgerError(f"{self._path}: what release {last.sequence} kept was changed; nothing is released")
        return kept

    def runs(self) -> list[Mapping[str, Any]]:
        """What every run was charged, in order."""
        return [event.content for event in self._events("reservation")]

    def given_out(self, site: str, study: str, run: str) -> list[Mechanism]:
        """The mechanisms of what a run has given out so far: its plan's, with as many steps as rounds were answered.

        Raises
        ------
        LedgerError
            If the run was never charged.
        """
        charged = self.reservation(site, study, run)
        if charged is None:
            raise LedgerError(f"{self._path}: run {run!r} was never charged; a run that was is accepted")
        spent, planned = self._spent(site, study, run), charged["parts"]
        main, profile = (described(m) for m in charged["mechanisms"])
        parts = [part for part in planned if part != "profile"]
        done = sum(part in spent for part in parts)
        if isinstance(main, SubsampledGaussian):
            main = replace(main, steps=main.steps * done // len(parts))
        return [*([main] if done else []), *([profile] if "profile" in spent else [])]

    def close_run(self, site: str, study: str, run: str, person: str) -> None:
        """Note that a run gets nothing more from this site; what it got stays, and is handed out again if asked.

        Raises
        ------
        LedgerError
            If the run was never charged.
        """
        self.given_out(site, study, run)
        content = {"site": site, "study": study, "run": run, "person": person}
        with self._transaction():
            if not self.is_closed(site, study, run):
                self._append("closed", content, site, study, run)

    def is_closed(self, site: str, study: str, run: str) -> bool:
        """Whether a person ended the run at this site."""
        return self._by_identity("closed", site, study, run) is not None

    def reserve(self, site: Site, study: Study, run: str, plan: PrivacyPlan, parts: Sequence[str]) -> None:
        """Charge a run's whole plan, durably, before its first release; a no-op for a run that is charged already.

        Raises
        ------
        BudgetExceededError
            If it would pass the lifetime cap.
        PolicyRefusal
            If the run was charged as another tier or for another plan.
        """
        mechanisms = [describe(m) for m in plan.mechanisms]
        with self._transaction():
            known = self.reservation(site.name, study.sha256, run)
            if known is not None:
                if (known["tier"], known["mechanisms"]) != (site.tier, mechanisms):
                    raise PolicyRefusal(f"{self._path}: run {run!r} was reserved as {known['tier']!r} for another plan")
                return
            check_lifetime(site.policy, self.charges(site.documents.assets), plan)
            content = {
                "site": site.name,
                "study": study.sha256,
                "run": run,
                "tier": site.tier,
                "size_class": site.size_class,
                "unit": study.privacy.unit,
                "adjacency": "add or remove one unit",
                "assets": list(site.documents.assets),
                "epsilon": plan.epsilon,
                "delta": plan.delta,
                "accounting": plan.accounting,
                "mechanisms": mechanisms,
                "parts": list(parts),
                "accountant": f"dp-accounting {metadata.version('dp-accounting')} PLD, interval {VERIFY_INTERVAL:g}",
                "policy": _caps(site.policy),
            }
            self._append("reservation", content, site.name, study.sha256, run)

    def store(
        self,
        site: str,
        study: str,
        run: str,
        key: str,
        digest: str,
        parts: Sequence[str],
        released: bytes,
        *,
        kept: bytes = b"",
    ) -> None:
        """Store the noised bytes of a release, durably, mark its parts as spent, and replace what the run kept.

        All or nothing: a release that is computed again, as its bytes were lost, begins where the first try began.

        Raises
        ------
        LedgerError
            If a part isn't in the run's plan or was spent before, or the disk refuses.
        """
        with self._transaction():
            reserved = None if self.is_closed(site, study, run) else self.reservation(site, study, run)
            planned = [] if reserved is None else reserved["parts"]
            spent = self._spent(site, study, run)
            if wrong := sorted(set(parts) - set(planned) | set(parts) & spent):
                raise LedgerError(
                    f"{self._path}: {wrong} can't be given out in run {run!r}, which plans {planned} and gave out "
                    f"{sorted(spent)}"
                )
            content = {
                "site": site,
                "study": study,
                "run": run,
                "key": key,
                "digest": digest,
                "parts": list(parts),
                "sha256": _sha256(released),
                "bytes": len(released),
            }
            if kept:
                content["kept"] = _sha256(kept)
            self._append("release", content, site, study, run, key, released=released)
            self._keep(kept, site, study, run)

    def decide(self, site: str, study: str, verdict: Verdict, person: str) -> None:
        """Note that a person agreed to a study or declined it; the last word counts."""
        content = {"site": site, "study": study, "verdict": verdict, "person": person}
        with self._transaction():
            self._append("decision", content, str(self.head().sequence))

    def verdict(self, site: str, study: str) -> Verdict | None:
        """The last decision about a study, or None."""
        said = [
            e.content["verdict"]
            for e in self._events("decision")
            if (e.content["site"], e.content["study"]) == (site, study)
        ]
        return said[-1] if said else None

    def ask(self, site: str, study: Study) -> None:
        """Keep a study for a person to look at. A coordinator can't fill the disk with it."""
        with self._transaction():
            known = self._by_identity("asked", site, study.sha256)
            if known is None and len(self.pending(site)) < MOST_PENDING:
                self._append(
                    "asked", {"site": site, "study": study.sha256, "canonical": study.canonical}, site, study.sha256
                )

    def asked(self, site: str) -> list[str]:
        """Hashes of all studies that ever waited for a person."""
        return [e.content["study"] for e in self._events("asked") if e.content["site"] == site]

    def pending(self, site: str) -> list[Study]:
        """Studies that wait for a decision."""
        asked = [e.content for e in self._events("asked") if e.content["site"] == site]
        return [Study.from_canonical(a["canonical"]) for a in asked if self.verdict(site, a["study"]) is None]

    def export(self, site: str) -> dict[str, Any]:
        """Every event and no bytes, for an auditor, under the name of the site that hands it out."""
        head = self.head()
        events = [
            {"sequence": e.sequence, "kind": e.kind, "content": e.content, "previous": e.previous, "hash": e.hash}
            for e in self._events()
        ]
        return {"format": FORMAT, "site": site, "ledger": head.ledger, "events": events}

    def verify(self, *, blobs: bool = False) -> None:
        """Follow the hash chain, and on demand read every stored release back.

        Raises
        ------
        LedgerError
            At the first event that was changed, or whose predecessor is missing.
        """
        events = self._events()
        follow_chain(str(self._path), events)
        if not events or events[0].content.get("format") != FORMAT:
            raise LedgerError(f"{self._path}: not a ledger of format {FORMAT}, which this version reads")
        if not blobs:
            return
        for event in self._events("release"):
            c = event.content
            self.stored(c["site"], c["study"], c["run"], c["key"], c["digest"])

    def _refuse_other_tables(self) -> None:
        # An earlier version's tables hold charges that this one doesn't read: starting anew beside them forgets them.
        names = {str(name) for (name,) in self._all("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if others := sorted(names - {"event", "blob", "kept"}):
            raise LedgerError(
                f"{self._path}: holds table {others[0]!r}, so it was made by another version or program; this version "
                f"reads ledgers of format {FORMAT}"
            )

    def _name_it(self) -> None:
        if self._all("SELECT 1 FROM event LIMIT 1"):
            return
        with self._transaction():
            # Another process may have been faster.
            if not self._all("SELECT 1 FROM event LIMIT 1"):
                self._append("opened", {"ledger": secrets.token_hex(16), "format": FORMAT}, "")

    def _append(self, kind: str, content: Mapping[str, Any], *identity: str, released: bytes | None = None) -> None:
        """Add one event, and its bytes; inside a transaction."""
        rows = self._all("SELECT sequence, hash FROM event ORDER BY sequence DESC LIMIT 1")
        sequence, previous = (rows[0][0] + 1, rows[0][1]) if rows else (1, "")
        # For people; nothing depends on a clock.
        dated = {**content, "at": datetime.now(UTC).isoformat(timespec="seconds")}
        name = self._seal.identity(kind, *identity)
        self._database.execute(
            "INSERT INTO event (sequence, kind, identity, content, previous, hash) VALUES (?, ?, ?, ?, ?, ?)",
            (
                sequence,
                kind,
                name,
                self._seal.close(_canonical(dated), sequence),
                previous,
                chain_hash(previous, sequence, kind, dated),
            ),
        )
        if released is not None:
            self._database.execute(
                "INSERT INTO blob (identity, bytes) VALUES (?, ?)", (name, self._seal.close(released, sequence))
            )

    def _mechanisms(self, reserved: Mapping[str, Any]) -> list[Mechanism]:
        """What a reservation counts for in a Renyi filter."""
        run = reserved["site"], reserved["study"], reserved["run"]
        return self.given_out(*run) if self.is_closed(*run) else [described(m) for m in reserved["mechanisms"]]

    def _keep(self, kept: bytes, *run: str) -> None:
        """Replace what a run keeps by what its newest release does; inside a transaction."""
        name = self._seal.identity("kept", *run)
        self._database.execute("DELETE FROM kept WHERE run = ?", (name,))
        if kept:
            sequence = self.head().sequence
            self._database.execute(
                "INSERT INTO kept (run, bytes) VALUES (?, ?)", (name, self._seal.close(kept, sequence))
            )

    def _spent(self, site: str, study: str, run: str) -> set[str]:
        return {part for release in self._releases(site, study, run) for part in release.content["parts"]}

    def _releases(self, site: str, study: str, run: str) -> list[Event]:
        named = {"site": site, "study": study, "run": run}
        return [e for e in self._events("release") if named.items() <= e.content.items()]

    def _by_identity(self, kind: str, *identity: str) -> Event | None:
        return self._one("identity = ?", self._seal.identity(kind, *identity))

    def _events(self, kind: str | None = None) -> list[Event]:
        return self._select("kind = ?", kind) if kind else self._select("1 = 1")

    def _one(self, condition: str, *values: object) -> Event | None:
        events = self._select(condition, *values)
        return events[0] if events else None

    def _select(self, condition: str, *values: object) -> list[Event]:
        rows = self._all(
            f"SELECT sequence, kind, content, previous, hash FROM event WHERE {condition} ORDER BY sequence", *values
        )
        return [self._event(*row) for row in rows]

    def _event(self, sequence: int, kind: str, content: bytes, previous: str, chained: str) -> Event:
        opened = self._seal.open(content, sequence)
        try:
            return Event(sequence, kind, json.loads(opened), previous, chained)
        except ValueError as cause:
            raise LedgerError(f"{self._path}: event {sequence} can't be read; the ledger was changed") from cause

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise
        except sqlite3.Error as cause:
            raise LedgerError(f"{self._path}: the ledger refused a write: {cause}") from cause

    def _all(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            return self._database.execute(query, values).fetchall()
        except sqlite3.Error as cause:
            raise LedgerError(f"{self._path}: the ledger can't be read: {cause}") from cause


def chain_hash(previous: str, sequence: int, kind: str, content: Mapping[str, Any]) -> str:
    """Hash of an event, which the next one carries."""
    return _sha256(_canonical([previous, sequence, kind, content]))


def follow_chain(source: str, events: Sequence[Event]) -> None:
    """Check that every event fits the one before it, from the first on.

    Raises
    ------
    LedgerError
        At the first that doesn't; ``source`` names the file.
    """
    last = ""
    for number, event in enumerate(events, start=1):
        expected = chain_hash(last, number, event.kind, event.content)
        if (event.sequence, event.previous, event.hash) != (number, last, expected):
            raise LedgerError(f"{source}: event {number} doesn't fit its hash chain; the ledger was changed")
        last = event.hash


class _Seal:
    """Encrypts what a ledger holds, if the site set a key. Hashes are over the open contents, so an export verifies."""

    _MARK = b"sealed:"

    def __init__(self, path: Path, key: bytes | None) -> None:
        self._path = path
        self._cipher = None if key is None else AESGCM(key)
        self._salt = b"" if key is None else hashlib.sha256(b"identity" + key).digest()

    def identity(self, *parts: str) -> str:
        """Unique name of an event. Keyed, so that without the key nobody can look up whether a study took place."""
        return _sha256(self._salt + _canonical(list(parts)))

    def close(self, data: bytes, sequence: int) -> bytes:
        if self._cipher is None:
            return data
        nonce = secrets.token_bytes(12)
        return self._MARK + nonce + self._cipher.encrypt(nonce, data, str(sequence).encode())

    def open(self, data: bytes, sequence: int) -> bytes:
        if not isinstance(data, bytes):
            raise LedgerError(f"{self._path}: event {sequence} isn't bytes; the ledger was changed")
        if data.startswith(self._MARK) != (self._cipher is not None):
            state = "encrypted, and site.ledger_key_file isn't set" if self._cipher is None else "not encrypted"
            raise LedgerError(f"{self._path}: the ledger is {state}; the setting it was made with is needed")
        if self._cipher is None:
            return data
        start = len(self._MARK)
        try:
            return self._cipher.decrypt(data[start : start + 12], data[start + 12 :], str(sequence).encode())
        except InvalidTag as cause:
            raise LedgerError(
                f"{self._path}: event {sequence} can't be decrypted; the ledger was changed, or this isn't its key"
            ) from cause


def _caps(policy: Policy) -> dict[str, Any]:
    return {name: getattr(policy, name) for name in ("max_epsilon", "max_delta", "composition")}


def _overlap(these: Sequence[str], those: Sequence[str]) -> bool:
    return not these or not those or not set(these).isdisjoint(those)


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
