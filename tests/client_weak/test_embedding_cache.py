"""Documents are embedded once; what is kept of them is sealed, forgotten in time, and never a reason not to answer."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time  # noqa: F401 - for code that runs elsewhere
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from client_weak import embedding_cache as module
from client_weak import vector_file
from client_weak.embedding_cache import embed_documents, made_by
from client_weak.vector_file import VectorFile
from client_weak.votes import noisy_ballot
from common.models.embedder import Embeddings, load_embedder, manifest_of_embedder
from common.models.manifest import Manifest
from common.protocol import CandidatePool
from common.site.config import Site
from common.site.documents import Documents
from common.site.plan import weak_plan
from common.study import Study, Voting
from tests.hospitals import rows, small_study, write_site

ROOT = Path(__file__).parents[2]
VOTING = Voting()
CHUNK = 8
NUMBER = 60
DIMENSION = 96


class Counting:
    """An embedder whose vectors look like noise, and which remembers what it was asked."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def embed(self, texts: Sequence[str]) -> Embeddings:
        self.seen += texts
        return np.array([vector_of(text) for text in texts], dtype=np.float32).reshape(-1, DIMENSION)


class Unasked:
    """An embedder that finds everything embedded."""

    def embed(self, texts: Sequence[str]) -> Embeddings:
        pytest.fail(f"{len(texts)} texts were embedded again")


class Killing(Counting):
    """An embedder during whose third chunk the process is killed."""

    def embed(self, texts: Sequence[str]) -> Embeddings:
        if len(self.seen) >= 2 * CHUNK:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().embed(texts)


def vector_of(text: str) -> Embeddings:
    seed = int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")
    return np.random.default_rng(seed).standard_normal(DIMENSION).astype(np.float32)


def texts_of(documents: Sequence[dict[str, Any]]) -> list[str]:
    return [row["text"] for row in documents]


def expected(texts: Sequence[str]) -> Embeddings:
    return Counting().embed(texts)


def rewrite(site: Site, documents: Sequence[dict[str, Any]]) -> list[str]:
    """Put other documents into the site's file; returns their texts."""
    pq.write_table(pa.Table.from_pylist(list(documents)), site.documents.path)
    return texts_of(documents)


def left_behind(site: Site) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(site.state.rglob("*")) if file.is_file())


def shown(site: Site, texts: Sequence[str]) -> int:
    """How many of the texts show a piece of their vector, 8 numbers long, anywhere in the state folder."""
    data = left_behind(site)
    pieces = [[vector_of(text)[i : i + 8].tobytes() for i in range(0, DIMENSION, 8)] for text in texts]
    return sum(any(piece in data for piece in of_text) for of_text in pieces)


def made_by_name(site: Site, voting: Voting, embedder: object) -> str:
    """In place of `made_by`: nobody installs a package or edits our code in the middle of a test."""
    return voting.embedder


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", CHUNK)
    monkeypatch.setattr(module, "made_by", made_by_name)


@pytest.fixture
def make_site(tmp_path: Path) -> Callable[..., Site]:
    def make(name: str = "weak", key: str = "", **top: Any) -> Site:
        if key:
            file = tmp_path / f"{name}-{key}.key"
            file.write_text(key * 32)
            file.chmod(0o600)
            top["ledger_key_file"] = str(file)
        shutil.rmtree(tmp_path / "hospitals" / name, ignore_errors=True)
        return Site.load(write_site(tmp_path, name, "weak", rows(NUMBER), **top))

    return make


@pytest.fixture
def site(make_site: Callable[..., Site]) -> Site:
    return make_site()


TEXTS = texts_of(rows(NUMBER))


@pytest.mark.parametrize("key", ["", "ab"])
def test_documents_are_embedded_once_and_found_to_the_last_bit(make_site: Callable[..., Site], key: str) -> None:
    site, first = make_site(key=key), Counting()
    fresh = embed_documents(site, VOTING, first, TEXTS)
    found = embed_documents(site, VOTING, Unasked(), TEXTS)
    assert first.seen == TEXTS
    for vectors in (fresh, found):
        assert (vectors.dtype, vectors.tobytes()) == (np.float32, expected(TEXTS).tobytes())


def test_votes_are_the_same_with_and_without_the_cache(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    study = Study.model_validate(small_study(Path("tiny")))
    embedder = load_embedder(study.voting)
    monkeypatch.setattr(type(embedder), "worth_caching", True)
    documents = Documents.load(site, study)
    pool = CandidatePool(tuple(f"The staff took {i % 7}, parking {i}." for i in range(40)), np.arange(40) % 4)
    # The discrete noise of such a scale is 0 but for a chance that never comes.
    mechanism = type(weak_plan(study).votes)(1e-3, weak_plan(study).votes.cells_per_unit)
    without = embedder.embed(documents.texts)
    ballots = []
    for vectors in (without, *(embed_documents(site, study.voting, embedder, documents.texts) for _ in range(2))):
        assert vectors.tobytes() == without.tobytes()
        ballots.append(noisy_ballot(documents, vectors, pool, embedder.embed(pool.texts), study, mechanism).array)
    assert ballots[0].any()
    assert all(np.array_equal(ballot, ballots[0]) for ballot in ballots)


def test_a_text_is_embedded_once_however_often_it_is_there(site: Site) -> None:
    texts, embedder = ["twice", "half \ud800 a character", "twice", *TEXTS, "twice"], Counting()
    vectors = embed_documents(site, VOTING, embedder, texts)
    assert vectors.tobytes() == expected(texts).tobytes()
    assert sorted(embedder.seen) == sorted(set(texts))


def test_no_document_at_all_is_no_special_case(site: Site) -> None:
    for _ in range(2):
        assert embed_documents(site, VOTING, Counting(), []).shape == (0, DIMENSION)


def test_with_the_ledgers_key_no_vector_and_no_hash_can_be_read(make_site: Callable[..., Site]) -> None:
    site = make_site(key="ab")
    embed_documents(site, VOTING, Counting(), TEXTS)
    assert shown(site, TEXTS) == 0
    data = left_behind(site)
    assert not any(hashlib.sha256(text.encode()).digest() in data for text in TEXTS)


def test_without_a_key_the_search_finds_every_vector(site: Site) -> None:
    embed_documents(site, VOTING, Counting(), TEXTS)
    assert shown(site, TEXTS) == NUMBER


def test_only_the_owner_reads_the_files_at_any_moment(site: Site) -> None:
    modes: set[int] = set()

    class Looking(Counting):
        def embed(self, texts: Sequence[str]) -> Embeddings:
            modes.update(file.stat().st_mode & 0o777 for file in site.state.iterdir())
            return super().embed(texts)

    umask = os.umask(0)
    try:
        embed_documents(site, VOTING, Looking(), TEXTS)
    finally:
        os.umask(umask)
    modes.update(file.stat().st_mode & 0o777 for file in site.state.iterdir())
    assert modes == {0o600}


def _elsewhere(code: str, site: Site) -> subprocess.Popen[bytes]:
    """Code in a process of its own, with this module's names and the site."""
    lines = (
        "from pathlib import Path\nfrom tests.client_weak.test_embedding_cache import *\n"
        "module.CHUNK, module.made_by = CHUNK, made_by_name\n"
        f"site = Site.model_validate_json({site.model_dump_json()!r})\n"
    )
    return subprocess.Popen([sys.executable, "-c", lines + code], cwd=ROOT, stdout=subprocess.PIPE)


def test_a_killed_request_goes_on_where_it_was(site: Site) -> None:
    process = _elsewhere("embed_documents(site, VOTING, Killing(), TEXTS)", site)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    again = Counting()
    vectors = embed_documents(site, VOTING, again, TEXTS)
    assert again.seen == TEXTS[2 * CHUNK :]
    assert vectors.tobytes() == expected(TEXTS).tobytes()


def test_two_processes_at_once_embed_every_document_once(site: Site) -> None:
    code = (
        "here = site.state.with_name('here')\nhere.mkdir(exist_ok=True)\n(here / str(os.getpid())).touch()\n"
        "while len(list(here.iterdir())) < 2: time.sleep(0.01)\n"
        "embedder = Counting()\nvectors = embed_documents(site, VOTING, embedder, TEXTS)\n"
        "print(json.dumps([len(embedder.seen), hashlib.sha256(vectors.tobytes()).hexdigest()]))"
    )
    processes = [_elsewhere(code, site) for _ in range(2)]
    told = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    assert sum(seen for seen, _ in told) == NUMBER
    assert {digest for _, digest in told} == {hashlib.sha256(expected(TEXTS).tobytes()).hexdigest()}


def test_a_withdrawn_documents_vector_is_nowhere(site: Site) -> None:
    embed_documents(site, VOTING, Counting(), TEXTS)
    embed_documents(site, Voting(embedder="sentence-transformers:other"), Counting(), TEXTS)
    stay = rows(NUMBER)
    # Again and again, so that pages of the file are rearranged in between.
    for seed in range(4):
        kept = np.sort(np.random.default_rng(seed).permutation(len(stay))[:-9])
        stay = [stay[i] for i in kept]
        texts = rewrite(site, stay)
        embed_documents(site, VOTING, Unasked(), texts)
        assert shown(site, [text for text in TEXTS if text not in texts]) == 0
        assert shown(site, texts) == len(texts)


@pytest.mark.parametrize("off", ["drop_others", "shrink"])
def test_a_withdrawn_documents_vector_would_be_found(site: Site, monkeypatch: pytest.MonkeyPatch, off: str) -> None:
    monkeypatch.setattr(VectorFile, off, lambda *_: None)
    if off == "shrink":
        plain = sqlite3.connect
        # And with a database that doesn't overwrite what it drops, as SQLite is by default.
        monkeypatch.setattr(vector_file.sqlite3, "connect", lambda *a, **k: _Careless(plain(*a, **k)))
    embed_documents(site, VOTING, Counting(), TEXTS)
    embed_documents(site, VOTING, Unasked(), rewrite(site, rows(NUMBER)[:-9]))
    assert shown(site, TEXTS[-9:]) > 0


class _Careless:
    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def execute(self, statement: str, *values: Any) -> Any:
        return self._database.execute(statement.replace("secure_delete=ON", "secure_delete=OFF"), *values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)


def test_vectors_of_a_file_that_is_no_longer_named_are_dropped_unless_its_texts_moved(site: Site) -> None:
    embed_documents(site, VOTING, Counting(), TEXTS)
    moved = site.documents.model_copy(update={"path": site.documents.path.with_name("newer.parquet")})
    later = site.model_copy(update={"documents": moved})
    texts, embedder = rewrite(later, rows(NUMBER + 20)[20:]), Counting()
    embed_documents(later, VOTING, embedder, texts)
    assert embedder.seen == texts[-20:]
    assert shown(site, TEXTS[:20]) == 0


def test_a_study_that_looks_at_a_part_leaves_the_rest(site: Site) -> None:
    embed_documents(site, VOTING, Counting(), TEXTS)
    embed_documents(site, VOTING, Unasked(), TEXTS[:5])
    embed_documents(site, VOTING, Unasked(), TEXTS)


def test_sites_that_share_a_state_folder_leave_each_other_alone(make_site: Callable[..., Site], tmp_path: Path) -> None:
    one, other = (make_site(name, state=str(tmp_path / "shared")) for name in ("one", "other"))
    embed_documents(one, VOTING, Counting(), TEXTS)
    embed_documents(other, VOTING, Counting(), rewrite(other, rows(30, offset=1000)))
    embed_documents(one, VOTING, Unasked(), TEXTS)


def test_another_embedder_never_gets_these_vectors(site: Site) -> None:
    embed_documents(site, VOTING, Counting(), TEXTS)
    other = Counting()
    embed_documents(site, Voting(embedder="sentence-transformers:other"), other, TEXTS)
    assert other.seen == TEXTS
    embed_documents(site, VOTING, Unasked(), TEXTS)


def test_vectors_that_may_be_rounded_differently_are_made_again_and_the_old_dropped(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed_documents(site, VOTING, Counting(), TEXTS)
    monkeypatch.setattr(module, "made_by", lambda *_: "another version")
    again = Counting()
    embed_documents(site, VOTING, again, TEXTS[:1])
    assert again.seen == TEXTS[:1]
    assert shown(site, TEXTS) == 1


@pytest.mark.parametrize("change", ["package", "processor", "threads", "files", "code", "embedder"])
def test_whatever_has_a_part_in_the_last_bit_makes_another_vector(
    site: Site, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    voting, embedder = VOTING, Counting()
    packages = list(module.metadata.distributions())
    monkeypatch.setattr(module.metadata, "distributions", lambda: packages)
    before = made_by(site, voting, embedder)
    assert before == made_by(site, voting, embedder)
    if change == "package":
        monkeypatch.setattr(module.metadata, "distributions", lambda: packages[1:])
    elif change == "processor":
        monkeypatch.setattr(module, "_processor", lambda: ["flags: avx512f"])
    elif change == "threads":
        monkeypatch.setenv("OMP_NUM_THREADS", "13")
    elif change == "files":
        monkeypatch.setattr(module, "manifest_of_embedder", lambda *_: SimpleNamespace(digest="0" * 64))
    elif change == "code":
        monkeypatch.setattr(module.inspect, "getfile", lambda _: __file__)
    else:
        monkeypatch.setattr(module, "manifest_of_embedder", partial(_manifest_of, VOTING.embedder))
        voting = Voting(embedder="sentence-transformers:the-same-files")
    assert made_by(site, voting, embedder) != before


def _manifest_of(name: str, *_: object) -> Manifest:
    return manifest_of_embedder(name)


def test_where_it_cannot_be_told_what_vectors_depend_on_none_is_kept(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "made_by", made_by)
    embedder = Counting()
    embed_documents(site, Voting(embedder="wordllama:no-such-model"), embedder, TEXTS)
    assert embedder.seen == TEXTS
    assert not (site.state / module.FILE).exists()
    assert "ModelError" in caplog.text


def _garbage(file: Path) -> None:
    file.write_bytes(b"no database " * 1000)


def _truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2 // 4096 * 4096])


def _other_tables(file: Path) -> None:
    file.unlink()
    with sqlite3.connect(file) as database:
        database.execute("CREATE TABLE notes (text TEXT)")


def _later_version(file: Path) -> None:
    with sqlite3.connect(file) as database:
        database.execute("PRAGMA user_version = 99")


def _no_salt(file: Path) -> None:
    with sqlite3.connect(file) as database:
        database.execute("DELETE FROM about WHERE name = 'salt'")


def _bit_flipped(file: Path) -> None:
    with sqlite3.connect(file) as database:
        row, vector = database.execute("SELECT rowid, vector FROM kept LIMIT 1 OFFSET 20").fetchone()
        changed = vector[:-1] + bytes([vector[-1] ^ 1])
        database.execute("UPDATE kept SET vector = ? WHERE rowid = ?", (changed, row))


def _vectors_swapped(file: Path) -> None:
    with sqlite3.connect(file) as database:
        (a, one), (b, two) = database.execute("SELECT rowid, vector FROM kept LIMIT 2 OFFSET 20").fetchall()
        database.executemany("UPDATE kept SET vector = ? WHERE rowid = ?", [(one, b), (two, a)])


def _not_bytes(file: Path) -> None:
    with sqlite3.connect(file) as database:
        database.execute("UPDATE kept SET vector = 'text' WHERE rowid = 20")


DAMAGE = [_garbage, _truncated, _other_tables, _later_version, _no_salt, _bit_flipped, _vectors_swapped, _not_bytes]


@pytest.mark.parametrize("key", ["", "ab"])
@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__.strip("_"))
def test_a_damaged_file_is_made_anew(
    make_site: Callable[..., Site],
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    key: str,
) -> None:
    site = make_site(key=key)
    embed_documents(site, VOTING, Counting(), TEXTS)
    damage(site.state / module.FILE)
    vectors = embed_documents(site, VOTING, Counting(), TEXTS)
    assert vectors.tobytes() == expected(TEXTS).tobytes()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "made anew" in caplog.text
    # What was found before the damage showed isn't written again; the next pass does that.
    embed_documents(site, VOTING, Counting(), TEXTS)
    embed_documents(site, VOTING, Unasked(), TEXTS)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("before", "after"), [("ab", "cd"), ("ab", ""), ("", "ab")])
def test_with_another_key_the_file_is_made_anew(
    make_site: Callable[..., Site], tmp_path: Path, before: str, after: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = str(tmp_path / "state")
    embed_documents(make_site(key=before, state=state), VOTING, Counting(), TEXTS)
    site, embedder = make_site(key=after, state=state), Counting()
    assert embed_documents(site, VOTING, embedder, TEXTS).tobytes() == expected(TEXTS).tobytes()
    assert embedder.seen == TEXTS
    assert "made anew" in caplog.text
    assert shown(site, TEXTS) == (0 if after else NUMBER)
    embed_documents(site, VOTING, Unasked(), TEXTS)


def _is_a_folder(site: Site) -> Site:
    (site.state / module.FILE).mkdir(parents=True)
    return site


def _has_no_folder(site: Site) -> Site:
    return site.model_copy(update={"state": Path("/proc/fedcorpus")})


def _is_below_a_file(site: Site) -> Site:
    return site.model_copy(update={"state": site.documents.path / "state"})


def _is_read_only(site: Site) -> Site:
    if os.geteuid() == 0:
        pytest.skip("an administrator writes everywhere")
    site.state.mkdir()
    site.state.chmod(0o500)
    return site


@pytest.mark.parametrize("spoil", [_is_a_folder, _has_no_folder, _is_below_a_file, _is_read_only])
def test_where_nothing_can_be_written_every_document_is_embedded(
    site: Site, caplog: pytest.LogCaptureFixture, spoil: Callable[[Site], Site]
) -> None:
    spoiled = spoil(site)
    for _ in range(2):
        caplog.clear()
        embedder = Counting()
        vectors = embed_documents(spoiled, VOTING, embedder, TEXTS)
        assert vectors.tobytes() == expected(TEXTS).tobytes()
        assert embedder.seen == TEXTS
        assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.fixture
def full_disk() -> Iterator[None]:
    """A disk that takes files of at most 48 KB: enough to begin with."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (48 << 10, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_stops_nothing(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    embedder = Counting()
    texts = [*TEXTS, *(f"more {i}" for i in range(200))]
    assert embed_documents(site, VOTING, embedder, texts).tobytes() == expected(texts).tobytes()
    assert embedder.seen == texts
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_switched_off_nothing_is_kept_and_what_was_is_removed(site: Site) -> None:
    off = site.model_copy(update={"cache_embeddings": False})
    for _ in range(2):
        embedder = Counting()
        assert embed_documents(off, VOTING, embedder, TEXTS).tobytes() == expected(TEXTS).tobytes()
        assert embedder.seen == TEXTS
        assert shown(site, TEXTS) == 0
        embed_documents(site, VOTING, Counting(), TEXTS)
        assert shown(site, TEXTS) == NUMBER


class Fast(Counting):
    worth_caching = False


def test_a_fast_embedders_vectors_are_not_kept(site: Site) -> None:
    embed_documents(site, VOTING, Fast(), TEXTS)
    assert not (site.state / module.FILE).exists()


def test_a_pass_of_a_fast_embedder_still_forgets_withdrawn_documents(site: Site) -> None:
    embed_documents(site, VOTING, Counting(), TEXTS)
    embed_documents(site, VOTING, Fast(), rewrite(site, rows(NUMBER)[:-9]))
    assert shown(site, TEXTS) == NUMBER - 9


def test_the_log_shows_progress_and_no_private_number(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(module, "TOLD_EVERY", 0.0)
    embed_documents(site, VOTING, Counting(), TEXTS)
    assert caplog.messages[0] == "documents are embedded: 1 of 10 parts"
    assert caplog.messages[-1] == "documents are embedded: 10 of 10 parts"
    assert not any(number in caplog.text for number in (str(NUMBER), str(CHUNK * 2), TEXTS[0]))
