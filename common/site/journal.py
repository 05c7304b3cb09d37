"""The file under a ledger: append-only events in one hash chain, and the bytes that some of them stand for.

It knows nothing of studies or budgets; what the events mean is `common.site.ledger`.

Three tables. ``event`` is the chain: every event carries the hash of the one before it. ``blob`` has bytes of events,
so that an auditor gets every event and no bytes. ``kept`` holds what a name keeps for its next event, and is replaced.
Triggers refuse updates and deletes of the first two; the chain betrays what went around them. Where a key is set,
contents and bytes are encrypted.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from common.errors import LedgerError
from common.site.files import create_private

FORMAT = 2
"""Version of the events; an export carries it."""

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


class Journal:
    """One file of events.

    Parameters
    ----------
    path
        The file; made if it isn't there.
    key
        32 bytes, or None for a journal in the clear.

    Raises
    ------
    LedgerError
        If the file can't be read or written, its hash chain is broken, or the key isn't its own.
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

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def events(self, kind: str | None = None) -> list[Event]:
        """All events, or those of one kind, in order."""
        return self._select("kind = ?", kind) if kind else self._select("1 = 1")

    def first(self) -> Event:
        """The event that names the journal.

        Raises
        ------
        LedgerError
            If it is missing.
        """
        event = self.at(1)
        if event is None:
            raise LedgerError(f"{self._path}: the ledger is empty; its first event is missing")
        return event

    def last(self) -> Event:
        """The newest event. Raises as `first` does."""
        return self._one("sequence = (SELECT MAX(sequence) FROM event)") or self.first()

    def at(self, sequence: int) -> Event | None:
        """The event of a number, from 1 on, or None."""
        return self._one("sequence = ?", sequence)

    def find(self, kind: str, *identity: str) -> Event | None:
        """The one event of a kind that has this identity, or None."""
        return self._one("identity = ?", self._seal.identity(kind, *identity))

    def bytes_of(self, event: Event, *identity: str) -> bytes:
        """What an event stands for, empty if it is gone. Whoever asks compares it with the hash that the event has."""
        rows = self._all("SELECT bytes FROM blob WHERE identity = ?", self._seal.identity(event.kind, *identity))
        return self._seal.open(rows[0][0], event.sequence) if rows else b""

    def kept(self, since: Event, *name: str) -> bytes:
        """What was kept under a name with the event ``since``; empty if there is nothing."""
        rows = self._all("SELECT bytes FROM kept WHERE run = ?", self._seal.identity("kept", *name))
        return self._seal.open(rows[0][0], since.sequence) if rows else b""

    def append(self, kind: str, content: Mapping[str, Any], *identity: str, released: bytes | None = None) -> None:
        """Add one event, and its bytes; inside a transaction. No two events of a kind have one identity."""
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

    def keep(self, kept: bytes, *name: str) -> None:
        """Replace what a name keeps by what belongs to the newest event, or by nothing; inside a transaction."""
        identity = self._seal.identity("kept", *name)
        self._database.execute("DELETE FROM kept WHERE run = ?", (identity,))
        if kept:
            sealed = self._seal.close(kept, self.last().sequence)
            self._database.execute("INSERT INTO kept (run, bytes) VALUES (?, ?)", (identity, sealed))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is written in it, or nothing; durable when it ends.

        Raises
        ------
        LedgerError
            If the disk refuses.
        """
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

    def verify(self) -> None:
        """Follow the hash chain.

        Raises
        ------
        LedgerError
            At the first event that was changed, or whose predecessor is missing.
        """
        events = self.events()
        follow_chain(str(self._path), events)
        if not events or events[0].content.get("format") != FORMAT:
            raise LedgerError(f"{self._path}: not a ledger of format {FORMAT}, which this version reads")

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
        with self.transaction():
            # Another process may have been faster.
            if not self._all("SELECT 1 FROM event LIMIT 1"):
                self.append("opened", {"ledger": secrets.token_hex(16), "format": FORMAT}, "")

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

    def _all(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            return self._database.execute(query, values).fetchall()
        except sqlite3.Error as cause:
            raise LedgerError(f"{self._path}: the ledger can't be read: {cause}") from cause


def chain_hash(previous: str, sequence: int, kind: str, content: Mapping[str, Any]) -> str:
    """Hash of an event, which the next one carries."""
    return sha256(_canonical([previous, sequence, kind, content]))


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


def sha256(data: bytes) -> str:
    """Hash of bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


class _Seal:
    """Encrypts what a ledger holds, if the site set a key. Hashes are over the open contents, so an export verifies."""

    _MARK = b"sealed:"

    def __init__(self, path: Path, key: bytes | None) -> None:
        self._path = path
        self._cipher = None if key is None else AESGCM(key)
        self._salt = b"" if key is None else hashlib.sha256(b"identity" + key).digest()

    def identity(self, *parts: str) -> str:
        """Unique name of an event. Keyed, so that without the key nobody can look up whether a study took place."""
        return sha256(self._salt + _canonical(list(parts)))

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


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
