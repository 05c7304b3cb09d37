"""The corpus and the artefacts of a run on disk. Everything written here is public or already noised."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from common.codes import ControlCodes
from common.protocol import CandidatePool
from server.workspace import Workspace, write_atomically

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class CorpusText:
    """One text of the corpus.

    Attributes
    ----------
    origin
        'candidate' (voted on), 'top-up' (generated after the vote) or 'repeat' (no fresh text could be made).
    """

    text: str
    code: int
    origin: Literal["candidate", "top-up", "repeat"]


def write_corpus(workspace: Workspace, codes: ControlCodes, texts: Sequence[CorpusText]) -> None:
    """Write ``corpus.jsonl`` and ``corpus.parquet``: id, text, one column per attribute, origin. Nothing site-level."""
    width = len(str(len(texts)))
    rows = [
        {
            "id": f"{number:0{width}d}",
            "text": _encodable(t.text),
            **codes.as_mapping(t.code),
            "origin": t.origin,
        }
        for number, t in enumerate(texts)
    ]
    write_atomically(workspace.corpus_jsonl, _json_lines(rows))
    columns = ["id", "text", *codes.names, "origin"]
    table = pa.table({name: pa.array([row[name] for row in rows], pa.string()) for name in columns})
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    write_atomically(workspace.corpus_parquet, buffer.getvalue())


def read_corpus(workspace: Workspace, codes: ControlCodes) -> list[CorpusText]:
    """Read ``corpus.jsonl`` back."""
    rows = [json.loads(line) for line in _lines(workspace.corpus_jsonl)]
    return [CorpusText(r["text"], _code(codes, r), r["origin"]) for r in rows]


def write_pool(path: Path, pool: CandidatePool) -> None:
    """Write the candidate pool as JSON lines of text and code index."""
    rows = [{"text": _encodable(t), "code": int(c)} for t, c in zip(pool.texts, pool.codes, strict=True)]
    write_atomically(path, _json_lines(rows))


def read_pool(path: Path) -> CandidatePool:
    """Inverse of `write_pool`."""
    rows = [json.loads(line) for line in _lines(path)]
    return CandidatePool(tuple(r["text"] for r in rows), np.array([r["code"] for r in rows], dtype=np.int32))


def write_profiles(path: Path, profiles: Mapping[str, Counts]) -> None:
    """Write the noisy profiles by site."""
    write_atomically(path, json.dumps({name: p.tolist() for name, p in profiles.items()}, indent=1).encode())


def read_profiles(path: Path) -> dict[str, Counts]:
    """Inverse of `write_profiles`."""
    loaded = json.loads(path.read_text(encoding="utf-8"))
    return {name: np.array(counts, dtype=np.int64) for name, counts in loaded.items()}


def write_ballots(path: Path, ballots: Mapping[str, Counts]) -> None:
    """Write the noisy ballots by site (npz)."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **dict(ballots))
    write_atomically(path, buffer.getvalue())


def read_ballots(path: Path) -> dict[str, Counts]:
    """Inverse of `write_ballots`."""
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def _code(codes: ControlCodes, row: Mapping[str, str]) -> int:
    index = codes.index(tuple(row[name] for name in codes.names))
    if index is None:
        raise KeyError(f"corpus row {row['id']!r} has values that the study doesn't declare")
    return index


def _encodable(text: str) -> str:
    """A lone surrogate can't be written as UTF-8: it becomes U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _json_lines(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _lines(path: Path) -> list[str]:
    # Only \n ends a line here; str.splitlines would also cut at U+2028 inside a text.
    return [line for line in path.read_text(encoding="utf-8").split("\n") if line]
