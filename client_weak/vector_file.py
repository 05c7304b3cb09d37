"""The file of `client_weak.embedding_cache`: vectors by what they were made of, in SQLite. Private.

A row's names are keyed hashes, and its vector is sealed together with them. With the ledger's key, whose derived keys
these are, both are encryption: without it a row tells nothing, not even whether a known text is among the site's
documents. Without a key, the names are hashes under a random salt that lies in the file itself: two sites' files, or
tables made beforehand, can't be compared with it, but whoever reads the file can look up a text that they guess, and
reads the vectors, from which much of a text can be told. So without a key the file is to be guarded like the documents,
which lie in the clear at the same site. The seal then is a checksum: a bit that flipped on the disk moves no vote.

Only one process has it open, which its user sees to; SQLite's rollback journal is gone once a change is made. What is
dropped is overwritten, and the file is written anew without it. What the disk itself keeps of blocks that were freed is
beyond a program.
"""

from __future__ import annotations

import hmac
import secrets
import sqlite3
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from common.site.files import create_private

Vector = NDArray[np.float32]

FORMAT = 1
"""Version of the tables; a file of another one is replaced."""

_SCHEMA = """
CREATE TABLE about (name TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE kept (
    owner BLOB NOT NULL, model BLOB NOT NULL, text BLOB NOT NULL, made_by BLOB NOT NULL, vector BLOB NOT NULL,
    PRIMARY KEY (owner, model, text));
"""
_STORED = np.dtype("<f4")
_NONCE = 12
_DAMAGE = {sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_MISMATCH}
"""What SQLite says of a file that isn't one of ours; the rest is about disks and permissions."""


class DamagedError(Exception):
    """The file isn't what was written, or was written under another key."""


@dataclass(frozen=True)
class Maker:
    """Who made vectors.

    Attributes
    ----------
    owner
        The site.
    model
        The embedder's name in a study.
    made_by
        Everything that a vector's last bit depends on but the text.
    """

    owner: str
    model: str
    made_by: str


class VectorFile:
    """One open file. Texts are given as hashes of them.

    Parameters
    ----------
    path
        The file; made if it isn't there.
    key
        The ledger's key, or None for a file in the clear.
    maker
        Whose vectors are looked up and kept.

    Raises
    ------
    DamagedError
        Also of every method: to be removed and made anew.
    OSError, sqlite3.Error
        Also of every method: the file can't be used.
    """

    def __init__(self, path: Path, key: bytes | None, maker: Maker) -> None:
        create_private(path)
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)
        self._database = sqlite3.connect(path, isolation_level=None)
        try:
            with _telling_damage():
                self._seal = _Seal(key, self._prepared())
                self._check_key()
        except BaseException:
            self._database.close()
            raise
        self._owner, self._model, self._made_by = (self._seal.name(part.encode()) for part in astuple(maker))

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def find(self, texts: Sequence[bytes]) -> dict[bytes, Vector]:
        """Vectors of those of ``texts`` that the maker has made."""
        query = "SELECT vector FROM kept WHERE owner = ? AND model = ? AND text = ? AND made_by = ?"
        found = {}
        with _telling_damage():
            for text in texts:
                row = self._row(text)
                for (sealed,) in self._database.execute(query, row):
                    found[text] = np.frombuffer(self._seal.open(sealed, row), dtype=_STORED).astype(np.float32)
        return found

    def keep(self, vectors: Mapping[bytes, Vector]) -> None:
        """Write vectors, all or none, durably."""
        rows = [(self._row(text), vector) for text, vector in vectors.items()]
        with self._transaction():
            self._database.executemany(
                "INSERT OR REPLACE INTO kept (owner, model, text, made_by, vector) VALUES (?, ?, ?, ?, ?)",
                [(*row, self._seal.close(vector.astype(_STORED).tobytes(), row)) for row, vector in rows],
            )

    def others(self, texts: Set[bytes]) -> bool:
        """Whether the owner has vectors, of any model, of other texts than these."""
        return not self._held() <= {self._seal.name(text) for text in texts}

    def drop_others(self, texts: Set[bytes]) -> None:
        """Drop the owner's vectors, of any model, of all texts but these."""
        gone = self._held() - {self._seal.name(text) for text in texts}
        self._drop("DELETE FROM kept WHERE owner = ? AND text = ?", [(self._owner, text) for text in gone])

    def drop_outdated(self) -> None:
        """Drop what the owner's model made in another way than now."""
        self._drop(
            "DELETE FROM kept WHERE owner = ? AND model = ? AND made_by <> ?",
            [(self._owner, self._model, self._made_by)],
        )

    def shrink(self) -> None:
        """Write the file anew, if something was dropped since that was last done. Takes as much memory as the file."""
        with _telling_damage():
            if self._database.execute("SELECT 1 FROM about WHERE name = 'dropped'").fetchone():
                # Overwriting what is dropped isn't enough: a page that was rearranged may hold an older copy of a row.
                self._database.execute("VACUUM")
                self._database.execute("DELETE FROM about WHERE name = 'dropped'")

    def _prepared(self) -> bytes:
        """Make the tables where there are none; the file's salt."""
        # Temporary copies stay in memory: another folder may be less private than this one.
        for pragma in ("secure_delete=ON", "temp_store=MEMORY"):
            self._database.execute(f"PRAGMA {pragma}").fetchall()
        if not self._database.execute("SELECT 1 FROM sqlite_master").fetchone():
            with self._transaction():
                for statement in _SCHEMA.split(";"):
                    self._database.execute(statement)
                self._tell("salt", secrets.token_bytes(32))
                self._database.execute(f"PRAGMA user_version = {FORMAT}")
        found = self._database.execute("PRAGMA user_version").fetchone()
        if found != (FORMAT,):
            raise DamagedError
        return self._told("salt")

    def _check_key(self) -> None:
        name = self._seal.name(b"which key")
        if not self._database.execute("SELECT 1 FROM about WHERE name = 'key'").fetchone():
            self._tell("key", name)
        if self._told("key") != name:
            raise DamagedError

    def _told(self, name: str) -> bytes:
        row = self._database.execute("SELECT value FROM about WHERE name = ?", (name,)).fetchone()
        if not row or not isinstance(row[0], bytes):
            raise DamagedError
        return row[0]

    def _tell(self, name: str, value: bytes) -> None:
        self._database.execute("INSERT INTO about (name, value) VALUES (?, ?)", (name, value))

    def _row(self, text: bytes) -> tuple[bytes, ...]:
        return self._owner, self._model, self._seal.name(text), self._made_by

    def _held(self) -> set[bytes]:
        with _telling_damage():
            return {text for (text,) in self._database.execute("SELECT text FROM kept WHERE owner = ?", (self._owner,))}

    def _drop(self, statement: str, values: Sequence[Sequence[bytes]]) -> None:
        with self._transaction():
            dropped = self._database.executemany(statement, values).rowcount
            if dropped > 0:
                self._database.execute("INSERT OR IGNORE INTO about (name, value) VALUES ('dropped', x'')")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with _telling_damage():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise


def remove(path: Path) -> None:
    """Remove a file that nobody has open. Raises OSError."""
    # The journal first: beside another file of the same name it would be taken for that one's.
    for file in (path.with_name(f"{path.name}-journal"), path):
        file.unlink(missing_ok=True)


class _Seal:
    """Names and seals rows, under keys of this file alone."""

    def __init__(self, key: bytes | None, salt: bytes) -> None:
        keys = HKDF(SHA256(), length=64, salt=salt, info=b"fedcorpus embedding cache").derive(key or b"")
        self._names, sealing = keys[:32], keys[32:]
        self._cipher = None if key is None else AESGCM(sealing)

    def name(self, of: bytes) -> bytes:
        return hmac.digest(self._names, of, "sha256")

    def close(self, vector: bytes, row: Sequence[bytes]) -> bytes:
        if self._cipher is None:
            return self._checksum(vector, row) + vector
        nonce = secrets.token_bytes(_NONCE)
        return nonce + self._cipher.encrypt(nonce, vector, b"".join(row))

    def open(self, sealed: Any, row: Sequence[bytes]) -> bytes:
        if not isinstance(sealed, bytes) or len(sealed) < 32:
            raise DamagedError
        if self._cipher is not None:
            return self._cipher.decrypt(sealed[:_NONCE], sealed[_NONCE:], b"".join(row))
        vector = sealed[32:]
        if sealed[:32] != self._checksum(vector, row):
            raise DamagedError
        return vector

    def _checksum(self, vector: bytes, row: Sequence[bytes]) -> bytes:
        return hmac.digest(self._names, b"".join(row) + vector, "sha256")


@contextmanager
def _telling_damage() -> Iterator[None]:
    try:
        yield
    except InvalidTag as cause:
        raise DamagedError from cause
    except sqlite3.DatabaseError as cause:
        # Without a code: sqlite3 itself couldn't make sense of a value.
        if getattr(cause, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF in _DAMAGE:
            raise DamagedError from cause
        raise
