"""Weights in files beside a graph are found, pinned, and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import load_external_data_for_model, set_external_data

from common.errors import ModelError
from common.models import onnx_embedder as module
from common.models.embedder import Embedder, load_embedder, manifest_of_embedder
from common.models.onnx_graph import PARTS, external_files
from common.study import Voting

TEXTS = ["The nurse on ward 4 was kind.", "ok"]


def load(model: Path) -> Embedder:
    return load_embedder(Voting(embedder=f"onnx:{model}"))


def store_beside(graph: Path, location: str) -> None:
    """Move a graph's weights into another file."""
    model = onnx.load(graph)
    data = b""
    for tensor in model.graph.initializer:
        if tensor.HasField("raw_data"):
            set_external_data(tensor, location, offset=len(data), length=len(tensor.raw_data))
            data += tensor.raw_data
            tensor.ClearField("raw_data")
    graph.write_bytes(model.SerializeToString())
    (graph.parent / location).write_bytes(data)


@pytest.mark.parametrize("name", ["model.onnx_data", "model.onnx.data", "weights"])
def test_they_are_loaded_and_pinned(folder: Path, exported: dict[str, Path], name: str) -> None:
    store_beside(folder / "onnx" / "model.onnx", name)
    assert external_files(folder / "onnx" / "model.onnx") == [name]
    np.testing.assert_array_equal(load(folder).embed(TEXTS), load(exported["float"]).embed(TEXTS))
    pinned = manifest_of_embedder(f"onnx:{folder}")
    assert f"onnx/{name}" in pinned.files
    data = bytearray((folder / "onnx" / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "onnx" / name).write_bytes(data)
    with pytest.raises(ModelError, match=pinned.digest):
        load_embedder(Voting(embedder=f"onnx:{folder}", embedder_sha256=pinned.digest))


@pytest.fixture
def escapes(folder: Path, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A model's folder whose graph has its weights outside, and their file."""
    store_beside(folder / "onnx" / "model.onnx", "../../outside")
    yield folder, tmp_path / "outside"
    assert (tmp_path / "outside").is_file(), "or it was refused because it isn't there"


def test_a_graph_that_wants_a_file_elsewhere_is_refused(escapes: tuple[Path, Path]) -> None:
    with pytest.raises(ModelError, match=r"wants the file '\.\./\.\./outside'; only one beside the graph"):
        load(escapes[0])


def test_the_runtime_refuses_it_too(escapes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A second wall: what a graph hides from the first isn't read either."""
    monkeypatch.setattr(module, "external_files", lambda graph: [])
    with pytest.raises(ModelError, match="can't be loaded by onnxruntime"):
        load(escapes[0])


@pytest.mark.parametrize("location", ["/etc/hostname", "..", "part/weights", ""])
def test_any_other_path_is_refused(folder: Path, location: str) -> None:
    graph = folder / "onnx" / "model.onnx"
    store_beside(graph, "weights")
    model = onnx.load(graph, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    graph.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=re.escape(f"wants the file {location!r}")):
        load(folder)


def test_a_link_that_leaves_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    store_beside(folder / "onnx" / "model.onnx", "weights")
    (folder / "onnx" / "weights").rename(tmp_path / "outside")
    (folder / "onnx" / "weights").symlink_to(tmp_path / "outside")
    with pytest.raises(ModelError, match="'weights' is a link that leaves the folder"):
        load(folder)


def test_weights_that_are_missing_are_named(folder: Path) -> None:
    store_beside(folder / "onnx" / "model.onnx", "weights")
    (folder / "onnx" / "weights").unlink()
    with pytest.raises(ModelError, match="the file 'weights' with its weights isn't beside it"):
        load(folder)


def test_no_message_that_can_hold_them_is_left_out() -> None:
    """Of onnx.proto: every way from a model to a tensor's external data is walked."""
    wanted = onnx.TensorProto.DESCRIPTOR.fields_by_name["external_data"]
    holds: dict[str, dict[int, str]] = {"TensorProto": {wanted.number: wanted.message_type.name}}
    known = onnx.ModelProto.DESCRIPTOR.file.message_types_by_name.values()
    while True:
        found = {
            message.name: {
                field.number: field.message_type.name
                for field in message.fields
                if field.message_type and field.message_type.name in holds and message.name != "TensorProto"
            }
            for message in known
        }
        grown = {name: fields for name, fields in found.items() if fields} | {"TensorProto": holds["TensorProto"]}
        if grown == holds:
            break
        holds = grown
    assert holds == PARTS


def test_those_of_a_graph_inside_a_graph_are_found(tmp_path: Path) -> None:
    def outside(name: str) -> TensorProto:
        tensor = numpy_helper.from_array(np.zeros(3, dtype=np.float32), name)
        set_external_data(tensor, name)
        tensor.ClearField("raw_data")
        (tmp_path / name).write_bytes(bytes(12))
        return tensor

    inner = helper.make_graph([], "inner", [], [], [outside("deep")])
    nodes = [
        helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner),
        helper.make_node("Constant", [], ["z"], value=outside("constant")),
    ]
    model = helper.make_model(helper.make_graph(nodes, "outer", [], [], [outside("top")]))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    assert external_files(tmp_path / "model.onnx") == ["constant", "deep", "top"]
    load_external_data_for_model(model, str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"not a graph", b"\xff" * 100, b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\x7f"])
def test_what_is_no_graph_is_one_sentence(folder: Path, content: bytes) -> None:
    (folder / "onnx" / "model.onnx").write_bytes(content)
    with pytest.raises(ModelError, match=r"not an ONNX graph|can't be loaded"):
        load(folder)


def test_a_graph_that_was_cut_is_one_sentence(folder: Path) -> None:
    graph = folder / "onnx" / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:-100])
    with pytest.raises(ModelError, match="not an ONNX graph"):
        load(folder)
