"""The corpus and the artefacts of a run on disk. Everything written here is public or already noised.

Every file is written whole or not at all. Texts may hold anything: line ends and NUL are escaped, and a lone
surrogate, which no UTF-8 file can hold, becomes U+FFFD.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args
from zipfile import BadZipFile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from common.codes import ControlCodes
from common.errors import DataError, ProtocolError
from server.workspace import Workspace, write_atomically

if TYPE_CHECKING:
    # Types only: it brings Flower, which takes a second to load and reading a corpus doesn't need.
    from common.protocol import CandidatePool

Counts = NDArray[np.int64]
Origin = Literal["candidate", "top-up", "repeat"]

OWN_COLUMNS = ("id", "text", "origin")
_LINE_ENDS = str.maketrans({c: f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"})
"""Line ends that JSON doesn't escape, but that some readers of JSON lines cut at."""


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
    origin: Origin


def write_corpus(workspace: Workspace, codes: ControlCodes, texts: Sequence[CorpusText]) -> None:
    """Write ``corpus.jsonl`` and ``corpus.parquet`` (zstd): id, text, one column per attribute, origin.

    Nothing in them says which site held or voted for what. An id is the text's place in ``texts``, so the same corpus
    has the same ids.
    """
    attributes = attribute_columns(codes, OWN_COLUMNS)
    rows = [
        {
            "id": text_id(number, len(texts)),
            "text": _encodable(t.text),
            **dict(zip(attributes, codes.combinations[t.code], strict=True)),
            "origin": t.origin,
        }
        for number, t in enumerate(texts)
    ]
    write_atomically(workspace.corpus_jsonl, "".join(map(json_line, rows)).encode())
    columns = ["id", "text", *attributes, "origin"]
    table = pa.table({name: pa.array([row[name] for row in rows], pa.string()) for name in columns})
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    write_atomically(workspace.corpus_parquet, buffer.getvalue())


def read_corpus(workspace: Workspace, codes: ControlCodes) -> list[CorpusText]:
    """Read ``corpus.jsonl`` back; raises as `iterate_corpus`."""
    return list(iterate_corpus(workspace, codes))


def iterate_corpus(workspace: Workspace, codes: ControlCodes) -> Iterator[CorpusText]:
    """Read ``corpus.jsonl`` text by text: a corpus of any length takes the memory of one text.

    Raises
    ------
    DataError
        If a line isn't a text of this study's corpus.
    """
    path, attributes = workspace.corpus_jsonl, attribute_columns(codes, OWN_COLUMNS)
    for number, row in enumerate(_rows(path), start=1):
        yield _corpus_text(path, number, row, codes, attributes)


def text_id(number: int, texts: int) -> str:
    """Id of a text: its place, as wide as the number of texts."""
    return f"{number:0{len(str(texts))}d}"


def attribute_columns(codes: ControlCodes, own: Sequence[str]) -> tuple[str, ...]:
    """Column of each attribute: its name, unless the table has a column of that name itself (``own``)."""
    taken = {*own, *codes.names}
    return tuple(_free(name, taken) if name in own else name for name in codes.names)


def json_line(row: Mapping[str, Any]) -> str:
    """A row as one line of JSON, which also readers that cut at other line ends than \\n read whole."""
    return json.dumps(row, ensure_ascii=False).translate(_LINE_ENDS) + "\n"


def check_corpus(texts: Sequence[CorpusText], quotas: Counts) -> Counts:
    """Texts that each code has, int64 ``(codes,)``; equal to ``quotas`` unless a code has a hole. Never raises."""
    within = [text.code for text in texts if 0 <= text.code < quotas.size]
    return np.bincount(np.array(within, dtype=np.int64), minlength=quotas.size).astype(np.int64)


def write_pool(path: Path, pool: CandidatePool) -> None:
    """Write the candidate pool as JSON lines of text and code index."""
    rows = [{"text": _encodable(t), "code": int(c)} for t, c in zip(pool.texts, pool.codes, strict=True)]
    write_atomically(path, "".join(map(json_line, rows)).encode())


def read_pool(path: Path) -> CandidatePool:
    """Inverse of `write_pool`.

    Raises
    ------
    DataError
        If the file isn't a pool.
    """
    from common.protocol import CandidatePool

    rows = list(_rows(path))
    if not all(isinstance(r.get("text"), str) and isinstance(r.get("code"), int) for r in rows):
        raise DataError(f"{path}: not a candidate pool; every line needs a text and the number of its code")
    return CandidatePool(tuple(r["text"] for r in rows), np.array([r["code"] for r in rows], dtype=np.int32))


def write_profiles(path: Path, profiles: Mapping[str, Counts]) -> None:
    """Write the noisy profiles by site, int64 ``(codes,)`` each (JSON)."""
    write_atomically(path, json.dumps({name: p.tolist() for name, p in profiles.items()}, indent=1).encode())


def read_profiles(path: Path) -> dict[str, Counts]:
    """Inverse of `write_profiles`.

    Raises
    ------
    DataError
        If the file isn't one of profiles.
    """
    try:
        loaded = json.loads(_content(path).decode("utf-8"))
        return {name: np.array(counts, dtype=np.int64) for name, counts in loaded.items()}
    except (ValueError, TypeError, AttributeError, OverflowError) as cause:
        raise DataError(f"{path}: not a file of noisy profiles: {cause}") from cause


def write_ballots(path: Path, ballots: Mapping[str, Counts]) -> None:
    """Write the noisy ballots by site, int64 ``(candidates,)`` each (npz: ``sites`` and ``ballots``).

    Sites are rows and not members of the archive: numpy gives some member names a meaning of their own.

    Raises
    ------
    ProtocolError
        If the ballots' lengths differ.
    """
    if len({ballot.shape for ballot in ballots.values()}) > 1:
        raise ProtocolError(f"write_ballots: shapes {[b.shape for b in ballots.values()]}; one is needed")
    rows = np.stack(list(ballots.values())) if ballots else np.zeros((0, 0), dtype=np.int64)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, sites=np.array(list(ballots), dtype=np.str_), ballots=rows.astype(np.int64))
    write_atomically(path, buffer.getvalue())


def read_ballots(path: Path) -> dict[str, Counts]:
    """Inverse of `write_ballots`. Nothing in the file is executed (no pickle).

    Raises
    ------
    DataError
        If the file isn't one of ballots.
    """
    try:
        with np.load(io.BytesIO(_content(path)), allow_pickle=False) as archive:
            return dict(zip(archive["sites"].tolist(), archive["ballots"], strict=True))
    except (ValueError, TypeError, AttributeError, LookupError, EOFError, BadZipFile) as cause:
        raise DataError(f"{path}: not a file of noisy ballots: {cause}") from cause


def _free(column: str, taken: set[str]) -> str:
    while column in taken:
        column = f"code.{column}"
    return column


def _corpus_text(
    path: Path, number: int, row: Mapping[str, Any], codes: ControlCodes, attributes: Sequence[str]
) -> CorpusText:
    code = codes.index(tuple(str(row.get(name)) for name in attributes))
    if code is None:
        raise DataError(f"{path}: line {number} has attribute values that the study doesn't declare")
    if not isinstance(row.get("text"), str) or row.get("origin") not in get_args(Origin):
        raise DataError(
            f"{path}: line {number} is no corpus text; a text and an origin of {get_args(Origin)} are needed"
        )
    return CorpusText(row["text"], code, row["origin"])


def _encodable(text: str) -> str:
    """A lone surrogate can't be written as UTF-8: it becomes U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        # Only \n ends a line in a binary file; as text it would also be cut at U+2028 inside a text.
        with path.open("rb") as file:
            for line in filter(bytes.strip, file):
                row = json.loads(line.decode("utf-8"))
                if not isinstance(row, dict):
                    raise DataError(f"{path}: every line must be a JSON object")
                yield row
    except OSError as cause:
        raise DataError(f"{path}: can't be read: {cause.strerror}") from cause
    except UnicodeDecodeError as cause:
        raise DataError(f"{path}: not UTF-8") from cause
    except json.JSONDecodeError as cause:
        raise DataError(f"{path}: not JSON lines: {cause}") from cause


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as cause:
        raise DataError(f"{path}: can't be read: {cause.strerror}") from cause
