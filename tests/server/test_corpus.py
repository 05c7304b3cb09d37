"""The run's artefacts on disk: what was written is read back, whatever the texts and names hold."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.codes import ControlCodes
from common.errors import DataError, ProtocolError
from common.protocol import CandidatePool
from server.corpus import (
    CorpusText,
    check_corpus,
    read_ballots,
    read_corpus,
    read_pool,
    read_profiles,
    write_ballots,
    write_corpus,
    write_pool,
    write_profiles,
)
from server.workspace import Workspace

CODES = ControlCodes.model_validate({"attributes": [{"name": "topic", "values": ["a", "b"]}]})
ANY_TEXT = st.text(st.characters(exclude_categories=()))
"""Lone surrogates, NUL and line ends of every kind included."""

SLOW_DISK = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)


def _as_written(text: str) -> str:
    """Surrogates in pairs are the character they stand for; single ones are U+FFFD."""
    paired = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in paired)


@SLOW_DISK
@given(
    st.lists(st.tuples(ANY_TEXT, st.integers(0, 1), st.sampled_from(["candidate", "top-up", "repeat"])), max_size=12)
)
def test_any_text_reads_back_from_both_files(tmp_path: Path, rows: list[tuple[str, int, str]]) -> None:
    workspace = Workspace(tmp_path)
    write_corpus(workspace, CODES, [CorpusText(*row) for row in rows])
    expected = [CorpusText(_as_written(text), code, origin) for text, code, origin in rows]
    assert read_corpus(workspace, CODES) == expected
    table = pq.read_table(workspace.corpus_parquet)
    assert table.column_names == ["id", "text", "topic", "origin"]
    # splitlines cuts at every kind of line end: a reader that uses it sees whole rows too.
    lines = workspace.corpus_jsonl.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == table.to_pylist()


def test_ids_are_distinct_sorted_and_the_same_every_time(tmp_path: Path) -> None:
    texts = [CorpusText(f"t{i}", i % 2, "candidate") for i in range(11)]
    files = []
    for name in ("one", "two"):
        workspace = Workspace(tmp_path / name).create()
        write_corpus(workspace, CODES, texts)
        files.append((workspace.corpus_jsonl.read_bytes(), workspace.corpus_parquet.read_bytes()))
    assert files[0] == files[1]
    ids = pq.read_table(workspace.corpus_parquet)["id"].to_pylist()
    assert ids == sorted(set(ids))
    assert len(ids) == 11


def test_parquet_is_compressed_with_zstd(tmp_path: Path) -> None:
    write_corpus(Workspace(tmp_path), CODES, [CorpusText("t", 0, "candidate")])
    group = pq.ParquetFile(tmp_path / "corpus.parquet").metadata.row_group(0)
    assert {group.column(i).compression for i in range(group.num_columns)} == {"ZSTD"}


def test_an_attribute_called_like_a_column_of_the_corpus_overwrites_nothing(tmp_path: Path) -> None:
    names = ["text", "id", "origin", "code.text", "topic"]
    codes = ControlCodes.model_validate({"attributes": [{"name": name, "values": ["x", "y"]} for name in names]})
    written = [CorpusText(f"hello {code}", code, "top-up") for code in range(len(codes))]
    write_corpus(Workspace(tmp_path), codes, written)
    assert read_corpus(Workspace(tmp_path), codes) == written
    columns = pq.read_table(tmp_path / "corpus.parquet").column_names
    assert columns == ["id", "text", "code.code.text", "code.id", "code.origin", "code.text", "topic", "origin"]


def test_a_corpus_that_cannot_be_written_leaves_the_old_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = [CorpusText("old", 0, "candidate")]
    write_corpus(Workspace(tmp_path), CODES, old)

    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("server.workspace.os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_corpus(Workspace(tmp_path), CODES, [CorpusText("new", 1, "candidate")] * 100)
    assert read_corpus(Workspace(tmp_path), CODES) == old
    assert pq.read_table(tmp_path / "corpus.parquet")["text"].to_pylist() == ["old"]


def test_the_check_counts_per_code_and_never_raises() -> None:
    texts = [CorpusText("x", code, "candidate") for code in (0, 2, 2, 9, -1)]
    assert check_corpus(texts, np.array([1, 1, 2])).tolist() == [1, 0, 2]
    assert check_corpus([], np.array([0, 0])).tolist() == [0, 0]


@pytest.mark.parametrize(
    "damaged",
    [
        b"{",
        b"[]\n",
        b"\xff\n",
        b'{"id": "0", "text": "t", "topic": "c", "origin": "candidate"}\n',
        b'{"id": "0", "text": "t", "origin": "candidate"}\n',
        b'{"id": "0", "text": 5, "topic": "a", "origin": "candidate"}\n',
        b'{"id": "0", "text": "t", "topic": "a", "origin": "elsewhere"}\n',
    ],
)
def test_a_damaged_corpus_is_refused_in_one_sentence(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "corpus.jsonl").write_bytes(damaged)
    with pytest.raises(DataError, match=r"corpus\.jsonl"):
        read_corpus(Workspace(tmp_path), CODES)


@SLOW_DISK
@given(st.lists(st.tuples(ANY_TEXT, st.integers(0, 2**31 - 1)), max_size=12))
def test_a_pool_reads_back(tmp_path: Path, rows: list[tuple[str, int]]) -> None:
    pool = CandidatePool(tuple(t for t, _ in rows), np.array([c for _, c in rows], dtype=np.int32))
    write_pool(tmp_path / "pool.jsonl", pool)
    read = read_pool(tmp_path / "pool.jsonl")
    assert read.texts == tuple(_as_written(text) for text in pool.texts)
    assert read.codes.dtype == np.int32
    assert read.codes.tolist() == pool.codes.tolist()


NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True) | st.sampled_from(
    ["file", "args", "kwds", "allow_pickle", "a", "a.npy", "sites", "ballots", "arr_0"]
)
COUNT = st.integers(-(2**63), 2**63 - 1)


@SLOW_DISK
@given(st.data(), st.integers(0, 5), st.lists(NAMES, unique=True, max_size=6))
def test_profiles_and_ballots_read_back_under_any_site_name(
    tmp_path: Path, data: st.DataObject, length: int, names: list[str]
) -> None:
    counts = st.lists(COUNT, min_size=length, max_size=length).map(lambda v: np.array(v, np.int64))
    written = {name: data.draw(counts) for name in names}
    write_ballots(tmp_path / "ballots.npz", written)
    write_profiles(tmp_path / "profiles.json", written)
    for read in (read_ballots(tmp_path / "ballots.npz"), read_profiles(tmp_path / "profiles.json")):
        assert list(read) == names
        assert all(read[name].dtype == np.int64 for name in names)
        assert all(read[name].tolist() == written[name].tolist() for name in names)


def test_ballots_of_unequal_length_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="shapes"):
        write_ballots(tmp_path / "ballots.npz", {"a": np.zeros(2, np.int64), "b": np.zeros(3, np.int64)})


def test_a_ballot_file_executes_nothing(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, sites=np.array([{"a": 1}], dtype=object), ballots=np.zeros((1, 1)))
    (tmp_path / "ballots.npz").write_bytes(buffer.getvalue())
    with pytest.raises(DataError, match="ballots"):
        read_ballots(tmp_path / "ballots.npz")


@pytest.mark.parametrize(
    "damaged", [b"", b"PK\x03\x04", b"\x93NUMPY", b"[1]", b'{"a": "x"}', b'{"a": [1e300]}', b"\xff"]
)
def test_damaged_artefacts_are_refused_in_one_sentence(tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / "damaged"
    path.write_bytes(damaged)
    for read in (read_ballots, read_profiles):
        with pytest.raises(DataError, match="damaged"):
            read(path)
    if damaged:
        with pytest.raises(DataError, match="damaged"):
            read_pool(path)


def test_a_missing_artefact_is_named(tmp_path: Path) -> None:
    for read in (read_ballots, read_profiles, read_pool):
        with pytest.raises(DataError, match="gone: can't be read"):
            read(tmp_path / "gone")
