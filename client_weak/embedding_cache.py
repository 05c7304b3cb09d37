"""Documents are embedded once: their vectors stay at the site, and never leave it.

    vectors = embed_documents(site, study.voting, embedder, documents.texts)

A killed request goes on where it was, and a second study over the same documents finds them embedded. Nothing else
changes, to the last bit: a vector that is found is the one that the embedder would give, as it is kept under the hash
of the text and of everything else that has a part in it. Candidates aren't kept: they differ from run to run.

Embeddings are private, as much of a text can be told from its vector; `client_weak.vector_file` says how they lie on
the disk. What is no longer among the site's documents is dropped at the next vote. How long a site takes to answer
shows roughly how many documents it embeds; with vectors kept, how many are new.

It is a convenience and never a reason not to answer: a damaged file, or one of another key, is made anew; where the
file can't be used, every document is embedded.
"""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import json
import logging
import os
import platform
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TextIO, TypeVar

import numpy as np

import common.models
from client_weak.vector_file import DamagedError, Maker, Vector, VectorFile, remove
from common.errors import FedcorpusError
from common.models.embedder import Embedder, Embeddings, manifest_of_embedder
from common.site.config import DocumentsFile, Site
from common.site.files import create_private
from common.site.formats import Problem, as_text, rows_of
from common.study import Voting

log = logging.getLogger("fedcorpus.weak")

T = TypeVar("T")

FILE = "embeddings.sqlite"
"""In the site's state folder."""

CHUNK = 512
"""Texts that are embedded and kept together: what a killed request loses at most."""

TOLD_EVERY = 30.0
"""Seconds between two lines of the log."""


def embed_documents(site: Site, voting: Voting, embedder: Embedder, texts: Sequence[str]) -> Embeddings:
    """Vectors of a site's documents, as ``embedder`` gives them; those that were kept aren't made again.

    Parameters
    ----------
    voting
        Names the embedder.
    texts
        Private.

    Returns
    -------
    ndarray
        float32 ``(texts, dimension)``, private.
    """
    wanted = site.cache_embeddings and getattr(embedder, "worth_caching", True)
    path = site.state / FILE
    if not wanted and not path.exists():
        return embedder.embed(texts)
    with _alone(path) as alone:
        if not alone:
            return embedder.embed(texts)
        if not site.cache_embeddings:
            _forget_all(path)
            return embedder.embed(texts)
        cache = _Cache(path, site, voting, embedder)
        try:
            cache.forget(texts)
            return _embedded(cache, embedder, texts) if wanted else embedder.embed(texts)
        finally:
            cache.close()


def _embedded(cache: _Cache, embedder: Embedder, texts: Sequence[str]) -> Embeddings:
    progress = _Progress(len(texts))
    parts = []
    for start in range(0, len(texts), CHUNK):
        chunk = texts[start : start + CHUNK]
        known = cache.find(chunk)
        # Each text once, in order: a document of several codes is there under each.
        if missing := [text for text in dict.fromkeys(chunk) if text not in known]:
            made = dict(zip(missing, embedder.embed(missing), strict=True))
            cache.keep(made)
            known |= made
        parts.append(np.stack([known[text] for text in chunk]))
        progress.tell(start + len(chunk))
    return np.concatenate(parts) if parts else embedder.embed(texts)


class _Cache:
    """What is known of the vectors. Whatever is wrong with the file, it only knows less."""

    def __init__(self, path: Path, site: Site, voting: Voting, embedder: Embedder) -> None:
        self._path, self._site = path, site
        self._file: VectorFile | None = None
        self._usable, self._replaced = True, False
        try:
            self._maker = Maker(site.name, voting.embedder, made_by(site, voting, embedder))
        except (FedcorpusError, OSError, TypeError) as cause:
            self._give_up(f"what the vectors depend on can't be told: {type(cause).__name__}")

    def find(self, texts: Sequence[str]) -> dict[str, Vector]:
        """Vectors by text."""
        by_hash = {_hash(text): text for text in texts}
        nothing: dict[bytes, Vector] = {}
        found = self._use(lambda file: file.find(list(by_hash)), nothing)
        return {by_hash[name]: vector for name, vector in found.items()}

    def keep(self, vectors: dict[str, Vector]) -> None:
        """Keep vectors by text."""
        self._use(lambda file: file.keep({_hash(text): vector for text, vector in vectors.items()}), None)

    def forget(self, texts: Sequence[str]) -> None:
        """Drop what can't be used any more: of texts that are gone from the site's file, or made in another way.

        Which texts are gone is seen in the whole file: a study that looks at a part of it says nothing of the rest.
        """
        hashes = {_hash(text) for text in texts}
        self._use(lambda file: file.drop_outdated(), None)
        if self._use(lambda file: file.others(hashes), False):
            try:
                hashes |= _hashes_of(self._site.documents)
            except FedcorpusError as cause:
                # It was read a moment ago. Without it nobody knows what is gone.
                self._give_up(f"the documents can't be read again: {type(cause).__name__}")
            self._use(lambda file: file.drop_others(hashes), None)
        self._use(lambda file: file.shrink(), None)

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _use(self, work: Callable[[VectorFile], T], otherwise: T) -> T:
        """What ``work`` finds in the file; ``otherwise`` if there is no file that can be used."""
        while self._usable:
            try:
                if self._file is None:
                    self._file = VectorFile(self._path, self._site.ledger_key(), self._maker)
                return work(self._file)
            except DamagedError:
                self._replace()
            except (sqlite3.Error, OSError, FedcorpusError) as cause:
                self._give_up(str(cause))
        return otherwise

    def _replace(self) -> None:
        self.close()
        if self._replaced:
            self._give_up("it is damaged again as soon as it is made")
            return
        self._replaced = True
        log.warning("%s: damaged, of another version, or of another key; it is made anew", self._path)
        try:
            remove(self._path)
        except OSError as cause:
            self._give_up(str(cause))

    def _give_up(self, reason: str) -> None:
        self.close()
        self._usable = False
        log.warning("%s: not used, so all documents are embedded: %s", self._path, reason)


def _hashes_of(documents: DocumentsFile) -> set[bytes]:
    """Of all texts in a site's file, whatever a study makes of them. Raises DataError."""
    rows = rows_of(documents.path, {documents.text_column: "documents.text_column"})
    return {_hash(as_text(row[0])) for row in rows if not isinstance(row, Problem)}


def made_by(site: Site, voting: Voting, embedder: Embedder) -> str:
    """Everything that a vector's last bit may depend on but its text.

    The embedder's files and our own code; all that is installed, as nothing tells which package has a part in a sum;
    and what libraries choose their instructions and their threads by.

    Raises
    ------
    ModelError, OSError, TypeError
        If it can't be told.
    """
    sources = {*Path(inspect.getfile(common.models)).parent.glob("*.py"), Path(inspect.getfile(type(embedder)))}
    threads = {name: value for name, value in os.environ.items() if name.startswith(("OMP_", "OPENBLAS_", "MKL_"))}
    depends_on = {
        "embedder": voting.embedder,
        "files": manifest_of_embedder(voting.embedder, site.models).digest,
        "code": sorted(hashlib.sha256(file.read_bytes()).hexdigest() for file in sources),
        "python": platform.python_version(),
        "packages": sorted({(str(found.name), str(found.version)) for found in metadata.distributions()}),
        "processor": [platform.machine(), platform.processor(), *_processor()],
        "threads": [os.cpu_count(), _own_processors(), threads],
    }
    return json.dumps(depends_on, sort_keys=True)


def _processor() -> list[str]:
    """What Linux tells of the processor, but for what changes from moment to moment."""
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return sorted({line for line in told if line.startswith(("model", "stepping", "flags", "Features", "CPU"))})


def _own_processors() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


class _Progress:
    """Tells the log now and then how far it is, in tenths: numbers of documents are private, and logs travel."""

    def __init__(self, number: int) -> None:
        self._number, self._told_at = number, time.monotonic()

    def tell(self, done: int) -> None:
        """Say that ``done`` texts have their vectors."""
        now = time.monotonic()
        if now - self._told_at >= TOLD_EVERY:
            self._told_at = now
            log.info("documents are embedded: %d of 10 parts", 10 * done // self._number)


@contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Wait until no other process uses the file; false if that can't be told."""
    lock_path = path.with_suffix(".lock")
    try:
        lock = _locked(lock_path)
    except OSError as cause:
        log.warning("%s: can't be locked, so all documents are embedded: %s", lock_path, cause.strerror)
        yield False
        return
    with lock:
        yield True


def _locked(lock_path: Path) -> TextIO:
    lock_path.parent.mkdir(parents=True, exist_ok=True)
    create_private(lock_path)
    lock = lock_path.open("r+", encoding="ascii")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        lock.close()
        raise
    return lock


def _forget_all(path: Path) -> None:
    try:
        remove(path)
    except OSError as cause:
        log.warning("%s: can't be removed: %s", path, cause.strerror)


def _hash(text: str) -> bytes:
    # A text may hold what no encoding has: half a character, out of JSON.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
