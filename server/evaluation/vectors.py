"""Vectors of texts, made once and kept: an evaluation that is repeated costs no embedding.

    vectors = Vectors("onnx:/models/minilm", cache=Path("cache"))
    vectors(texts)      # float32 (texts, dimension), rows of length 1

The cache is for public or test data: much of a text can be told from its vector. A site's own vectors are kept
elsewhere, and otherwise (`client_weak.embedding_cache`).
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.errors import UserError
from common.models.embedder import Embedder, load_embedder, manifest_of_embedder
from common.study import Voting

Unit = NDArray[np.float32]
Progress = Callable[[int, int], None]
"""Texts that are done, texts in all."""

_AT_ONCE = 256


class Vectors:
    """Embeds texts, longest last, each different one once.

    Parameters
    ----------
    embedder
        As in ``voting.embedder`` of a study.
    cache
        Folder in which vectors are kept; unset keeps them for this object only.

    Raises
    ------
    ModelError, MissingExtraError
        As `common.models.embedder.load_embedder`.
    UserError
        If the cache can't be used.
    """

    def __init__(self, embedder: str, cache: Path | None = None) -> None:
        self.name = embedder
        self._options = Voting(embedder=embedder)
        self._model: Embedder | None = None
        digest = manifest_of_embedder(embedder).digest
        self._known: dict[bytes, Unit] = {}
        self._file = None if cache is None else _File(cache, digest)

    def __call__(self, texts: Sequence[str], progress: Progress = lambda done, total: None) -> Unit:
        """Vectors of length 1, float32 ``(texts, dimension)``; a zero vector stays zero."""
        wanted = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in texts]
        self._look_up(wanted)
        missing = {own: text for own, text in zip(wanted, texts, strict=True) if own not in self._known}
        done = len(set(wanted)) - len(missing)
        for chunk in _chunks(sorted(missing, key=lambda own: len(missing[own]))):
            progress(done, len(set(wanted)))
            self._keep(chunk, _of_length_1(self._embed([missing[own] for own in chunk])))
            done += len(chunk)
        progress(done, len(set(wanted)))
        if not wanted:
            return self._embed([])
        return np.stack([self._known[own] for own in wanted])

    def _embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        # No one votes here: a vector may depend on its batch in the last bits, where that is faster.
        model = self._embedder()
        found: NDArray[np.float32] = getattr(model, "embed_batched", model.embed)(texts)
        return found

    def _embedder(self) -> Embedder:
        # Not before it is needed: where all vectors are kept, no model is loaded.
        self._model = self._model or load_embedder(self._options)
        return self._model

    def _look_up(self, wanted: Sequence[bytes]) -> None:
        unknown = [own for own in dict.fromkeys(wanted) if own not in self._known]
        if self._file is not None:
            self._known |= self._file.find(unknown)

    def _keep(self, chunk: Sequence[bytes], made: Unit) -> None:
        found = dict(zip(chunk, made, strict=True))
        self._known |= found
        if self._file is not None:
            self._file.keep(found)


class _File:
    """Vectors by the SHA-256 of their text, of one embedder."""

    def __init__(self, folder: Path, digest: str) -> None:
        self._path = folder / f"vectors-{digest[:16]}.sqlite"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self._opened() as file, file:
                file.execute("CREATE TABLE IF NOT EXISTS vectors (text BLOB PRIMARY KEY, vector BLOB) WITHOUT ROWID")
        except (OSError, sqlite3.Error) as cause:
            raise UserError(
                f"--cache {folder}: can't be used: {cause}; a folder that can be written is needed"
            ) from cause

    def find(self, wanted: Sequence[bytes]) -> dict[bytes, Unit]:
        found: dict[bytes, Unit] = {}
        with self._opened() as file:
            for chunk in _chunks(wanted):
                marks = ",".join("?" * len(chunk))
                rows = file.execute(f"SELECT text, vector FROM vectors WHERE text IN ({marks})", chunk)  # noqa: S608
                found |= {own: np.frombuffer(vector, dtype=np.float32) for own, vector in rows}
        return found

    def keep(self, found: dict[bytes, Unit]) -> None:
        rows = [(own, vector.astype(np.float32).tobytes()) for own, vector in found.items()]
        with self._opened() as file, file:
            file.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", rows)

    def _opened(self) -> closing[sqlite3.Connection]:
        return closing(sqlite3.connect(self._path, timeout=60))


def _chunks(items: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    for start in range(0, len(items), _AT_ONCE):
        yield items[start : start + _AT_ONCE]


def _of_length_1(vectors: NDArray[np.float32]) -> Unit:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.where(norms > 0, norms, 1), dtype=np.float32)
