"""ONNX embedders: a text's vector is its own to the last bit, and the model's; every file that makes it is pinned."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from sentence_transformers import SentenceTransformer

from common.errors import MissingExtraError, ModelError
from common.models import onnx_embedder as module
from common.models.embedder import Embedder, load_embedder, manifest_of_embedder
from common.models.manifest import RECORDED, Manifest
from common.models.onnx_embedder import OnnxEmbedder, OnnxFiles
from common.study import Voting
from tests.tiny_embedder import DIMENSION, MOST_TOKENS, modules, pooling, write_json

ROOT = Path(__file__).parents[3]
TEXTS = [
    "The nurse on ward 4 was kind.",
    "",
    "Parking is expensive, and the machine takes no coins. " * 40,
    "ok",
    "Nothing could be improved, thank you to all the nurses.",
    "ทีมพยาบาลดีมาก",
    "x" * 50_000,
    "The nurse on ward 4 was kind.",
]


def load(model: Path) -> Embedder:
    return load_embedder(Voting(embedder=f"onnx:{model}"))


# Each text for itself


@pytest.mark.parametrize("kind", ["float", "int8"])
@pytest.mark.parametrize("threads", [1, 4])
def test_a_text_has_the_same_vector_in_any_company(exported: dict[str, Path], kind: str, threads: int) -> None:
    embedder = OnnxEmbedder(OnnxFiles.find(str(exported[kind])), threads=threads)
    texts = TEXTS * 8
    together = embedder.embed(texts)
    assert together.dtype == np.float32
    assert together.shape == (len(texts), DIMENSION)
    for text, vector in zip(texts, together, strict=True):
        np.testing.assert_array_equal(embedder.embed([text])[0], vector)
    order = np.random.default_rng(0).permutation(len(texts))
    np.testing.assert_array_equal(embedder.embed([texts[i] for i in order]), together[order])
    np.testing.assert_array_equal(load(exported[kind]).embed(texts[:1]), together[:1])


def test_in_a_batch_of_8_bit_integers_it_would_not(exported: dict[str, Path]) -> None:
    """Twin: what running texts one at a time prevents."""
    embedder = OnnxEmbedder(OnnxFiles.find(str(exported["int8"])))
    own = embedder._tokenizer.encode(TEXTS[0]).ids
    # Of one length, so that padding plays no part.
    batch = np.array([own, *np.random.default_rng(0).integers(4, 90, size=(20, len(own)))])
    given = {"input_ids": batch, "attention_mask": np.ones_like(batch), "token_type_ids": np.zeros_like(batch)}
    together = embedder._session.run(None, given)[0][0]
    alone = embedder._session.run(None, {name: rows[:1] for name, rows in given.items()})[0][0]
    assert not np.array_equal(together, alone)


def test_no_text_is_no_vector(exported: dict[str, Path]) -> None:
    assert load(exported["int8"]).embed([]).shape == (0, DIMENSION)


def test_every_text_has_a_vector(exported: dict[str, Path]) -> None:
    vectors = load(exported["int8"]).embed(TEXTS)
    assert np.isfinite(vectors).all()
    assert (np.linalg.norm(vectors, axis=1) > 0).all()


# The model's own vectors


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"1_Pooling/config.json": pooling("cls_token")},
        {"1_Pooling/config.json": {"embedding_dimension": DIMENSION, "pooling_mode": "cls"}},
        {"modules.json": modules("Transformer", "Pooling", "Normalize")},
        {"sentence_bert_config.json": {"max_seq_length": 7}},
        {"sentence_bert_config.json": {"max_seq_length": MOST_TOKENS, "do_lower_case": True}},
        {"sentence_bert_config.json": {}},
        {
            "config_sentence_transformers.json": {
                "prompts": {"query": "query: ", "other": "x"},
                "default_prompt_name": "query",
            }
        },
    ],
    ids=["mean", "first token", "first token, new form", "length 1", "shorter", "lower case", "own limit", "prompt"],
)
def test_they_are_those_of_sentence_transformers(
    folder: Path, plain: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    own = Path(shutil.copytree(plain, tmp_path / "own"))
    for name, content in changes.items():
        write_json(own, name, content)
        write_json(folder, name, content)
    texts = [text for text in TEXTS if text]
    expected = SentenceTransformer(str(own), device="cpu").encode(texts, batch_size=1, show_progress_bar=False)
    np.testing.assert_allclose(OnnxEmbedder(OnnxFiles.find(str(folder))).embed(texts), expected, rtol=0, atol=2e-5)
    if changes:
        unchanged = SentenceTransformer(str(plain), device="cpu").encode(texts, batch_size=1, show_progress_bar=False)
        assert not np.allclose(expected, unchanged, atol=1e-3), "or the change means nothing"


def test_without_a_list_of_modules_it_is_a_mean(folder: Path, exported: dict[str, Path]) -> None:
    for name in ("modules.json", "1_Pooling/config.json"):
        (folder / name).unlink()
    np.testing.assert_array_equal(load(folder).embed(TEXTS), load(exported["float"]).embed(TEXTS))


# Which graph is meant


@pytest.fixture
def graphs(folder: Path) -> Callable[..., Path]:
    """Leaves the model's folder with graphs of these names."""

    def place(*names: str) -> Path:
        graph = (folder / "onnx" / "model.onnx").read_bytes()
        (folder / "onnx" / "model.onnx").unlink()
        for name in names:
            (folder / name).write_bytes(graph)
        return folder

    return place


@pytest.mark.parametrize(
    ("names", "asked", "taken"),
    [
        (["onnx/model.onnx"], "", "onnx/model.onnx"),
        (["model.onnx"], "", "model.onnx"),
        (["onnx/model.onnx", "onnx/model_int8.onnx", "onnx/model_O4.onnx"], "", "onnx/model.onnx"),
        (["onnx/model_int8.onnx"], "", "onnx/model_int8.onnx"),
        (["onnx/model.onnx", "onnx/model_int8.onnx"], "onnx/model_int8.onnx", "onnx/model_int8.onnx"),
        (["model.onnx", "onnx/model.onnx"], "model.onnx", "model.onnx"),
    ],
)
def test_the_graph_that_is_meant_is_taken(
    graphs: Callable[..., Path], names: list[str], asked: str, taken: str
) -> None:
    folder = graphs(*names)
    assert OnnxFiles.find(str(folder / asked)) == OnnxFiles(folder, folder / taken)


@pytest.mark.parametrize(
    ("names", "asked", "said"),
    [
        ([], "", "no ONNX graph in"),
        (["onnx/a.onnx", "onnx/b.onnx"], "", "holds 2 ONNX graphs (onnx/a.onnx, onnx/b.onnx); name one, as 'onnx:"),
        (["model.onnx", "onnx/model.onnx"], "", "holds 2 ONNX graphs (model.onnx, onnx/model.onnx); name one"),
        (["model.onnx"], "onnx/model_int8.onnx", "no file"),
        (["model.onnx"], "elsewhere", "no ONNX graph in"),
    ],
)  # fmt: skip
def test_one_that_is_not_clear_is_refused(graphs: Callable[..., Path], names: list[str], asked: str, said: str) -> None:
    with pytest.raises(ModelError, match=re.escape(said)):
        OnnxFiles.find(str(graphs(*names) / asked))


def test_a_kind_without_a_name_is_refused() -> None:
    with pytest.raises(ModelError, match=r"needs a folder or an \.onnx file"):
        load_embedder(Voting(embedder="onnx"))


def test_a_site_keeps_it_where_it_likes(exported: dict[str, Path]) -> None:
    study = Voting(embedder="onnx:minilm")
    expected = load(exported["int8"]).embed(TEXTS)
    for place in (exported["int8"], exported["int8"] / "onnx" / "model_int8.onnx"):
        np.testing.assert_array_equal(load_embedder(study, {"onnx:minilm": place}).embed(TEXTS), expected)


@pytest.mark.parametrize("missing", ["onnxruntime", "tokenizers"])
def test_a_missing_library_is_one_sentence(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.importlib.util.find_spec
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None if name == missing else real(name))
    with pytest.raises(MissingExtraError, match=r"fedcorpus\[onnx\]"):
        load_embedder(Voting(embedder="onnx:folder"))


# What a study pins


def test_what_is_read_is_pinned_and_nothing_else(folder: Path) -> None:
    manifest = manifest_of_embedder(f"onnx:{folder}")
    assert list(manifest.files) == [
        "1_Pooling/config.json", "config.json", "modules.json", "onnx/model.onnx", "sentence_bert_config.json",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    (folder / "README.md").write_text("another")
    (folder / "onnx" / "model_int8.onnx").write_text("another graph, which isn't meant")
    (folder / "model.safetensors").write_text("for torch")
    assert manifest_of_embedder(f"onnx:{folder}") == manifest


@pytest.mark.parametrize("name", ["onnx/model.onnx", "tokenizer.json", "1_Pooling/config.json", "config.json"])
def test_one_changed_byte_is_refused(folder: Path, name: str) -> None:
    pinned = manifest_of_embedder(f"onnx:{folder}").digest
    load_embedder(Voting(embedder=f"onnx:{folder}", embedder_sha256=pinned))
    assert (folder / RECORDED).is_file(), "by which the difference is named"
    content = bytearray((folder / name).read_bytes())
    if name.endswith(".onnx"):
        content[len(content) // 2] ^= 1
    else:
        content += b"\n"
    (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match=f"{pinned}.*'{re.escape(name)}' has another content"):
        load_embedder(Voting(embedder=f"onnx:{folder}", embedder_sha256=pinned))


def test_what_a_file_that_comes_says_counts(folder: Path) -> None:
    before = manifest_of_embedder(f"onnx:{folder}")
    write_json(folder, "config_sentence_transformers.json", {})
    assert manifest_of_embedder(f"onnx:{folder}").difference(before).endswith("was added")


def test_graphs_of_one_folder_have_digests_of_their_own(folder: Path, exported: dict[str, Path]) -> None:
    shutil.copy(exported["int8"] / "onnx" / "model_int8.onnx", folder / "onnx")
    found = {manifest_of_embedder(f"onnx:{folder}/onnx/{name}.onnx").digest for name in ("model", "model_int8")}
    assert len(found) == 2


def test_graphs_beside_other_models_do_not_count(folder: Path, plain: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(plain, tmp_path / "torch"))
    before = Manifest.of(copied).digest
    shutil.copytree(folder / "onnx", copied / "onnx")
    assert Manifest.of(copied).digest == before


# Graphs of other exporters


def write_graph(
    folder: Path,
    inputs: dict[str, int],
    *,
    outputs: tuple[str, ...] = ("last_hidden_state",),
    rank: int = 3,
    rows: int = 0,
) -> None:
    """A graph that gives for a token the sum of its inputs and its negative, or what a table of ``rows`` holds."""
    nodes = [helper.make_node("Cast", [name], [f"f-{name}"], to=TensorProto.FLOAT) for name in inputs]
    nodes += [
        helper.make_node("Sum", [f"f-{name}" for name in inputs], ["sum"]),
        helper.make_node("Neg", ["sum"], ["negative"]),
        helper.make_node("Unsqueeze", ["sum", "axis"], ["a"]),
        helper.make_node("Unsqueeze", ["negative", "axis"], ["b"]),
    ]
    initial = [numpy_helper.from_array(np.array([2]), "axis")]
    if rows:
        initial.append(numpy_helper.from_array(np.ones((rows, 2), dtype=np.float32), "table"))
        nodes.append(helper.make_node("Gather", ["table", "input_ids"], ["found"]))
    else:
        nodes.append(helper.make_node("Concat", ["a", "b"], ["found"], axis=2))
    for name in outputs:
        kind = "ReduceMean" if name == "sentence_embedding" or rank == 2 else "Identity"
        options = {"axes": [1], "keepdims": 0} if kind == "ReduceMean" else {}
        nodes.append(helper.make_node(kind, ["found"], [name], **options))
    shapes = {name: [None] * (2 if name == "sentence_embedding" else rank) for name in outputs}
    graph = helper.make_graph(
        nodes,
        "other",
        [helper.make_tensor_value_info(name, kind, ["texts", "tokens"]) for name, kind in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()],
        initial,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (folder / "onnx" / "model.onnx").write_bytes(model.SerializeToString())


@pytest.mark.parametrize("dtype", [TensorProto.INT64, TensorProto.INT32])
@pytest.mark.parametrize("others", [(), ("attention_mask",), ("position_ids", "token_type_ids", "attention_mask")])
def test_it_is_given_what_it_asks_for(folder: Path, dtype: int, others: tuple[str, ...]) -> None:
    write_graph(folder, dict.fromkeys(("input_ids", *others), dtype))
    embedder = OnnxEmbedder(OnnxFiles.find(str(folder)))
    ids = np.array(embedder._tokenizer.encode(TEXTS[0]).ids)
    added = {"attention_mask": 1, "position_ids": np.arange(len(ids)), "token_type_ids": 0}
    expected = (ids + sum(added[name] for name in others)).mean()
    np.testing.assert_allclose(embedder.embed(TEXTS[:1]), [[expected, -expected]], rtol=1e-6)


@pytest.mark.parametrize(
    "outputs", [("token_embeddings", "sentence_embedding"), ("sentence_embedding", "0"), ("0", "last_hidden_state")]
)
def test_the_tokens_vectors_are_taken(folder: Path, outputs: tuple[str, ...]) -> None:
    write_graph(folder, {"input_ids": TensorProto.INT64}, outputs=outputs)
    assert load(folder).embed(TEXTS).shape == (len(TEXTS), 2)


@pytest.mark.parametrize(
    ("inputs", "options", "said"),
    [
        ({"input_ids": TensorProto.INT64, "pixels": TensorProto.INT64}, {}, "asks for ['input_ids', 'pixels']"),
        ({"input_ids": TensorProto.FLOAT}, {}, "asks for ['input_ids']; integers"),
        ({"attention_mask": TensorProto.INT64}, {}, "asks for ['attention_mask']"),
        ({"input_ids": TensorProto.INT64}, {"outputs": ("sentence_embedding",)}, "gives ['sentence_embedding']; one"),
        ({"input_ids": TensorProto.INT64}, {"outputs": ("0", "1")}, "gives ['0', '1']; one"),
        ({"input_ids": TensorProto.INT64}, {"rank": 2}, "doesn't give one vector for each token"),
    ],
)
def test_a_graph_of_another_kind_is_refused(
    folder: Path, inputs: dict[str, int], options: dict[str, Any], said: str
) -> None:
    write_graph(folder, inputs, **options)
    with pytest.raises(ModelError, match=re.escape(said)):
        load(folder)


def test_a_graph_that_fails_says_nothing_of_the_text(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The runtime's own words name the token that isn't in its table."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    token = max(vocabulary, key=vocabulary.get)
    write_graph(folder, {"input_ids": TensorProto.INT64}, rows=vocabulary[token])
    embedder = OnnxEmbedder(OnnxFiles.find(str(folder)))
    with pytest.raises(ModelError, match="can't be run on one of the texts") as caught:
        embedder.embed([TEXTS[0], token.removeprefix("##")])
    assert str(vocabulary[token]) not in str(caught.value).replace(str(folder), "")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")


# What a site has and what it tells


def test_it_runs_without_torch(exported: dict[str, Path]) -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'sentence_transformers', 'onnx')))\n"
        "from common.models.embedder import load_embedder; from common.study import Voting\n"
        f"print(load_embedder(Voting(embedder='onnx:{exported['int8']}')).embed(['a']).shape)"
    )
    assert _run(code) == f"(1, {DIMENSION})"


def test_the_runtime_is_one_that_can_not_report() -> None:
    """Builds of 1.29 and later hold an uploader, and the name of the variable that silences it."""
    files = [*Path(module.runtime().__file__).parent.joinpath("capi").glob("*.so*")]
    assert files
    assert not [file.name for file in files if b"DISABLE_TELEMETRY" in file.read_bytes()]


def test_nothing_is_left_on_the_machine(exported: dict[str, Path], tmp_path: Path) -> None:
    """Where a build reports, it keeps an identity of the machine in the cache from its import on."""
    code = (
        "from common.models.embedder import load_embedder; from common.study import Voting\n"
        f"load_embedder(Voting(embedder='onnx:{exported['int8']}')).embed(['a'])"
    )
    _run(code, HOME=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert list(tmp_path.rglob("*")) == []


def test_another_runtime_is_silenced_before_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "onnxruntime.py").write_text("import os\nseen = os.environ.get('ORT_DISABLE_TELEMETRY')\n")
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    ours = "from common.models.onnx_embedder import runtime; print(runtime().seen)"
    assert _run(ours, PYTHONPATH=path) == "1"
    assert _run("import onnxruntime; print(onnxruntime.seen)", PYTHONPATH=path) == "None", "twin: imported by itself"


def _run(code: str, **environment: str) -> str:
    """Output of Python code, without the variables by which a library knows of tests."""
    kept = {name: value for name, value in os.environ.items() if name not in ("CI", "ORT_DISABLE_TELEMETRY")}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
