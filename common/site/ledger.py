"""The ledger: a site's durable, append-only record of every release and what it cost.

Three tables. ``reservation``: one row per run, written before the run's first release is computed; it charges the whole
plan. ``spent_part``: which parts of a plan were given out (``profile``, ``train/3``, ``votes``); each exactly once.
``release``: the question's digest and the noised bytes that answered it. Rows are chained by hash, and triggers refuse
updates and deletes. Nothing exact is ever written here.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.errors import ConflictError, LedgerError, PolicyRefusal
from common.privacy.accounting import PrivacyPlan, describe
from common.site.config import Policy
from common.site.policy import check_lifetime

_SCHEMA = """
CREATE TABLE IF NOT EXISTS reservation (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT, study TEXT NOT NULL, run TEXT NOT NULL, tier TEXT NOT NULL,
    epsilon REAL NOT NULL, delta REAL NOT NULL, mechanisms TEXT NOT NULL, parts TEXT NOT NULL,
    previous TEXT NOT NULL, hash TEXT NOT NULL, UNIQUE (study, run));
CREATE TABLE IF NOT EXISTS release (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT, study TEXT NOT NULL, run TEXT NOT NULL, key TEXT NOT NULL,
    digest TEXT NOT NULL, blob BLOB NOT NULL, previous TEXT NOT NULL, hash TEXT NOT NULL, UNIQUE (study, run, key),
    FOREIGN KEY (study, run) REFERENCES reservation (study, run));
CREATE TABLE IF NOT EXISTS spent_part (
    study TEXT NOT NULL, run TEXT NOT NULL, part TEXT NOT NULL, key TEXT NOT NULL, PRIMARY KEY (study, run, part),
    FOREIGN KEY (study, run, key) REFERENCES release (study, run, key));
"""
_TABLES = ("reservation", "release", "spent_part")


class Ledger:
    """One site's ledger file. Use it inside `Ledger.exclusive`: one release at a time.

    Raises
    ------
    LedgerError
        On opening, if the file can't be read or written, or its hash chain is broken. Then nothing is released.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, isolation_level=None, timeout=60)
            for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
                self._database.execute(f"PRAGMA {pragma}")
            self._database.executescript(_SCHEMA + _append_only())
        except (sqlite3.Error, OSError) as cause:
            raise LedgerError(f"{path}: the ledger can't be opened: {cause}") from cause
        path.chmod(0o600)
        self.verify()

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    @contextmanager
    def exclusive(self) -> Iterator[Ledger]:
        """Hold the site's one lock: from looking a request up until its answer is stored."""
        with (self._path.with_suffix(".lock")).open("w") as lock:
            os.chmod(lock.name, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield self

    def spent(self) -> tuple[float, float]:
        """(epsilon, delta) charged so far, over all runs, added up."""
        charges = self._all("SELECT epsilon, delta FROM reservation")
        return sum(float(epsilon) for epsilon, _ in charges), sum(float(delta) for _, delta in charges)

    def stored(self, study: str, run: str, key: str, digest: str) -> bytes | None:
        """The bytes that answered this request before, or None.

        Raises
        ------
        ConflictError
            If the key was answered for a question with other content.
        """
        row = self._one("SELECT digest, blob FROM release WHERE study=? AND run=? AND key=?", study, run, key)
        if row is None:
            return None
        if row[0] != digest:
            raise ConflictError(
                f"{self._path}: {key!r} of run {run!r} was answered for a question with digest {row[0][:12]}…; this "
                f"one has {digest[:12]}…, and an answer is given once"
            )
        return bytes(row[1])

    def unspent(self, study: str, run: str, part: str) -> bool:
        """True if the run's plan hasn't given out ``part`` yet."""
        return self._one("SELECT 1 FROM spent_part WHERE study=? AND run=? AND part=?", study, run, part) is None

    def reserve(self, study: str, run: str, tier: str, plan: PrivacyPlan, parts: Sequence[str], policy: Policy) -> None:
        """Charge a run's whole plan, durably, before its first release; a no-op for a run that is charged already.

        Raises
        ------
        BudgetExceededError
            If it would pass the lifetime cap.
        PolicyRefusal
            If the run was charged as another tier or for another plan.
        """
        mechanisms = json.dumps([describe(m) for m in plan.mechanisms], sort_keys=True)
        with self._transaction():
            row = self._one("SELECT tier, mechanisms FROM reservation WHERE study=? AND run=?", study, run)
            if row is not None:
                if tuple(row) != (tier, mechanisms):
                    raise PolicyRefusal(f"{self._path}: run {run!r} was reserved as {row[0]!r} for another plan")
                return
            check_lifetime(policy, self.spent(), plan)
            content = (study, run, tier, plan.epsilon, plan.delta, mechanisms, json.dumps(list(parts)))
            previous = self._head("reservation")
            self._database.execute(
                "INSERT INTO reservation (study, run, tier, epsilon, delta, mechanisms, parts, previous, hash) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*content, previous, _chain(previous, content)),
            )

    def store(self, study: str, run: str, key: str, digest: str, parts: Sequence[str], blob: bytes) -> None:
        """Store the noised bytes of a release, durably, and mark its parts as spent.

        Raises
        ------
        LedgerError
            If a part isn't in the run's plan or was spent before, or the disk refuses.
        """
        with self._transaction():
            row = self._one("SELECT parts FROM reservation WHERE study=? AND run=?", study, run)
            planned = json.loads(row[0]) if row else []
            if unplanned := sorted(set(parts) - set(planned)):
                raise LedgerError(f"{self._path}: {unplanned} aren't in the plan of run {run!r}, which has {planned}")
            content = (study, run, key, digest)
            previous = self._head("release")
            self._database.execute(
                "INSERT INTO release (study, run, key, digest, blob, previous, hash) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (*content, blob, previous, _chain(previous, (*content, _sha256(blob)))),
            )
            self._database.executemany(
                "INSERT INTO spent_part (study, run, part, key) VALUES (?, ?, ?, ?)",
                [(study, run, part, key) for part in parts],
            )

    def verify(self) -> None:
        """Follow the hash chains.

        Raises
        ------
        LedgerError
            At the first row that was changed, or whose predecessor is missing.
        """
        reservations = self._all(
            "SELECT study, run, tier, epsilon, delta, mechanisms, parts, previous, hash FROM reservation "
            "ORDER BY sequence"
        )
        _follow(self._path, "reservation", ((row[:-2], row[-2], row[-1]) for row in reservations))
        releases = self._all("SELECT study, run, key, digest, blob, previous, hash FROM release ORDER BY sequence")
        _follow(self._path, "release", (((*row[:4], _sha256(bytes(row[4]))), row[5], row[6]) for row in releases))

    def _head(self, table: str) -> str:
        row = self._one(f"SELECT hash FROM {table} ORDER BY sequence DESC LIMIT 1")
        return str(row[0]) if row else ""

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")
        except sqlite3.Error as cause:
            raise LedgerError(f"{self._path}: the ledger refused a write: {cause}") from cause

    def _one(self, query: str, *values: object) -> tuple[Any, ...] | None:
        rows = self._all(query, *values)
        return rows[0] if rows else None

    def _all(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            return self._database.execute(query, values).fetchall()
        except sqlite3.Error as cause:
            raise LedgerError(f"{self._path}: the ledger can't be read: {cause}") from cause


def _append_only() -> str:
    return "".join(
        f"CREATE TRIGGER IF NOT EXISTS {table}_no_{verb} BEFORE {verb} ON {table} "
        f"BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;\n"
        for table in _TABLES
        for verb in ("UPDATE", "DELETE")
    )


def _follow(path: Path, table: str, rows: Iterator[tuple[tuple[object, ...], object, object]]) -> None:
    last = ""
    for number, (content, previous, stored) in enumerate(rows, start=1):
        if previous != last or stored != _chain(last, content):
            raise LedgerError(f"{path}: row {number} of {table!r} doesn't fit its hash chain; the ledger was changed")
        last = str(stored)


def _chain(previous: str, content: Sequence[object]) -> str:
    return _sha256(json.dumps([previous, *content]).encode())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
