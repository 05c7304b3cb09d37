"""The files beside an ONNX graph that hold weights of it. A weak site has no library that would say which.

They are part of what a study pins, and none may lie elsewhere. So the graph is walked as the protocol buffer that it
is: only messages in which a tensor can lie are entered, and the weights themselves are skipped.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from common.errors import ModelError

_TENSOR, _ENTRY = "TensorProto", "StringStringEntryProto"

PARTS: dict[str, dict[int, str]] = {
    "ModelProto": {7: "GraphProto", 20: "TrainingInfoProto", 25: "FunctionProto"},
    "TrainingInfoProto": {1: "GraphProto", 2: "GraphProto"},
    "GraphProto": {1: "NodeProto", 5: _TENSOR, 15: "SparseTensorProto"},
    "FunctionProto": {7: "NodeProto", 11: "AttributeProto"},
    "NodeProto": {5: "AttributeProto"},
    "AttributeProto": {
        5: _TENSOR, 6: "GraphProto", 10: _TENSOR, 11: "GraphProto", 22: "SparseTensorProto", 23: "SparseTensorProto",
    },
    "SparseTensorProto": {1: _TENSOR, 2: _TENSOR},
    _TENSOR: {13: _ENTRY},
}  # fmt: skip
"""Message of onnx.proto -> number of each field that can hold a tensor's external data -> message of that field."""

_KEY, _VALUE = 1, 2

_LENGTH_DELIMITED = 2
_FIXED = {1: 8, 5: 4}
"""Bytes of the wire types that have a fixed length."""

_LONGEST_VARINT = 10


def external_files(graph: Path) -> list[str]:
    """Names of the files beside ``graph`` that hold weights of it, sorted.

    Raises
    ------
    ModelError
        If it isn't an ONNX graph, or wants a file that doesn't lie beside it.
    """
    try:
        with graph.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found = _locations(data)
    except (OSError, ValueError, IndexError) as cause:
        raise ModelError(f"model {str(graph)!r}: not an ONNX graph") from cause
    for name in found:
        if name != Path(name).name or name in ("", ".", ".."):
            raise ModelError(f"model {str(graph)!r}: wants the file {name!r}; only one beside the graph is accepted")
        if not (graph.parent / name).is_file():
            raise ModelError(f"model {str(graph)!r}: the file {name!r} with its weights isn't beside it")
        if not (graph.parent / name).resolve().is_relative_to(graph.parent.resolve()):
            raise ModelError(f"model {str(graph)!r}: {name!r} is a link that leaves the folder; a copy is accepted")
    return sorted(found)


def _locations(data: mmap.mmap) -> set[str]:
    found = set()
    # Not by recursion: graphs may lie in graphs, as deep as whoever wrote the file likes.
    waiting = [("ModelProto", 0, len(data))]
    while waiting:
        message, start, end = waiting.pop()
        inside = _fields(data, start, end)
        if message == _ENTRY:
            entry = {number: bytes(data[first:last]) for number, first, last in inside}
            if entry.get(_KEY) == b"location":
                found.add(entry.get(_VALUE, b"").decode())
            continue
        parts = PARTS[message]
        waiting += [(parts[number], first, last) for number, first, last in inside if number in parts]
    return found


def _fields(data: mmap.mmap, start: int, end: int) -> list[tuple[int, int, int]]:
    """(number, start, end) of every field of one message that has a length. Raises ValueError, IndexError."""
    found, at = [], start
    while at < end:
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == _LENGTH_DELIMITED:
            length, at = _varint(data, at)
            found.append((number, at, at + length))
            at += length
        elif kind == 0:
            _, at = _varint(data, at)
        else:
            at += _FIXED.get(kind, end)
    if at != end:
        raise ValueError
    return found


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    """The number that begins at ``at``, and where it ends."""
    value = 0
    for place in range(_LONGEST_VARINT):
        byte = data[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError
