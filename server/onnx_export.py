"""Make an ONNX embedder of a sentence-transformers folder: what weak sites run without torch.

    exported = export_embedder(Path("all-MiniLM-L6-v2"), Path("minilm-int8"), int8=True)
    exported.name, exported.digest        # voting.embedder and voting.embedder_sha256 of a study

As 8-bit integers it is a quarter as large and about twice as fast; weights are rounded to 7 bits, which processors
without VNNI sum up exactly, too: the eighth would overflow there and the vectors be others.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel

from common.errors import MissingExtraError, ModelError
from common.models.embedder import manifest_of_embedder
from common.models.manifest import RECORDED
from common.models.onnx_embedder import GRAPHS, OnnxEmbedder, OnnxFiles, load_tokenizer, runtime
from common.models.recipe import Recipe
from server.workspace import replace_folder

_OPSET = 17
"""Any onnxruntime that pyproject.toml allows takes it."""

_LEAST_COSINE = 0.9999
"""Of a vector of the 32-bit graph with torch's own; a graph that is traced wrongly is far off."""

_CHECKED = (
    "The staff were kind.",
    "The staff explained what they did, and why, in words that I understood.",
    "A 64-year-old man was admitted with chest pain; the ECG showed ST elevation in leads II, III and aVF. " * 40,
)
"""Of very different lengths: a length that was traced into the graph would show."""


@dataclass(frozen=True)
class Exported:
    """An ONNX embedder that was made.

    Attributes
    ----------
    name, digest
        ``voting.embedder`` and ``voting.embedder_sha256``.
    least_cosine
        Between its vectors and torch's, over a few texts: the least.
    """

    name: str
    digest: str
    least_cosine: float


def export_embedder(folder: Path, out: Path, *, int8: bool) -> Exported:
    """Write a new folder with the graph, the tokenizer and how vectors are pooled; all of it or nothing.

    Parameters
    ----------
    folder
        In sentence-transformers format: a transformer with safetensors, pooled by mean or first token.
    int8
        Whether to store weights as 8-bit integers.

    Raises
    ------
    ModelError
        If the folder is no such model, the new one exists or can't be written, or the graph gives other vectors.
    MissingExtraError
        If a library is missing.
    """
    _check_places(folder, out)
    recipe = Recipe.of(folder)
    if int8 and importlib.util.find_spec("onnx") is None:
        raise MissingExtraError("--int8 needs onnx, which isn't installed; pip install 'fedcorpus[evaluation]'")
    model = _model(folder)
    least: list[float] = []

    def write(building: Path) -> None:
        # A folder of this kind is made for one's own eyes, but models are there for a site's service to read.
        building.chmod(0o755)
        for name in recipe.files:
            (building / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, building / name)
        graph = _write_graph(model, building, int8)
        least.append(_agreement(model, recipe, OnnxFiles(building, graph)))
        if not int8 and least[0] < _LEAST_COSINE:
            raise ModelError(
                f"model {str(folder)!r}: can't be exported; a graph was made, but gives other vectors than torch "
                f"(cosine {least[0]:.4f})"
            )
        manifest = manifest_of_embedder(f"onnx:{building}")
        (building / RECORDED).write_text(manifest.text, encoding="utf-8")

    try:
        replace_folder(out.absolute(), write)
    except OSError as cause:
        raise ModelError(f"{out}: the embedder can't be written ({cause.strerror}); nothing is left of it") from cause
    name = f"onnx:{out}"
    return Exported(name, manifest_of_embedder(name).digest, least[0])


def _check_places(folder: Path, out: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{str(folder)!r}: no config.json there; a sentence-transformers folder is needed")
    if os.path.lexists(out):
        raise ModelError(f"{out}: exists already; an embedder is written to a new folder")
    if not out.absolute().parent.is_dir():
        raise ModelError(f"{out}: the folder that it would be in isn't there")


def _model(folder: Path) -> Any:
    try:
        model = AutoModel.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", use_safetensors=True, local_files_only=True
        )
    except (OSError, ValueError) as cause:
        raise ModelError(
            f"model {str(folder)!r}: can't be loaded; a transformer of a known architecture in safetensors is needed"
        ) from cause
    if model.config.is_encoder_decoder:
        raise ModelError(f"model {str(folder)!r}: has a decoder, too; an encoder alone is supported")
    return model.eval()


class _Tokens(torch.nn.Module):  # type: ignore[misc]
    """A transformer that takes its inputs in order and gives its tokens' vectors."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.names = ["input_ids", "attention_mask"]
        asks = inspect.signature(model.forward).parameters
        if "token_type_ids" in asks and getattr(model.config, "type_vocab_size", 0) > 1:
            self.names.append("token_type_ids")

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Vectors, ``(texts, tokens, dimension)``, of int64 inputs ``(texts, tokens)`` that are named by ``names``."""
        return self.model(**dict(zip(self.names, inputs, strict=True))).last_hidden_state


def _write_graph(model: Any, building: Path, int8: bool) -> Path:
    (building / GRAPHS).mkdir()
    if not int8:
        return _traced(model, building / GRAPHS / "model.onnx")
    with tempfile.TemporaryDirectory(prefix=".float-", dir=building) as large:
        return _quantised(_traced(model, Path(large) / "model.onnx"), building / GRAPHS / "model_int8.onnx")


def _traced(model: Any, graph: Path) -> Path:
    # Else the exporter leaves the model in training, with dropout.
    tokens = _Tokens(model).eval()
    given = {"input_ids": torch.ones, "attention_mask": torch.ones, "token_type_ids": torch.zeros}
    names = [*tokens.names, "last_hidden_state"]
    try:
        with _quiet():
            torch.onnx.export(
                tokens,
                tuple(given[name](2, 8, dtype=torch.int64) for name in tokens.names),
                str(graph),
                input_names=tokens.names,
                output_names=names[-1:],
                dynamic_axes={name: {0: "texts", 1: "tokens"} for name in names},
                opset_version=_OPSET,
                # The exporter that needs no further library.
                dynamo=False,
            )
    except (RuntimeError, TypeError, ValueError) as cause:
        raise ModelError(f"a model of type {model.config.model_type!r} can't be exported as an ONNX graph") from cause
    return graph


def _quantised(large: Path, graph: Path) -> Path:
    runtime()
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with _quiet():
        quantize_dynamic(large, graph, weight_type=QuantType.QInt8, per_channel=True, reduce_range=True)
    return graph


def _agreement(model: Any, recipe: Recipe, files: OnnxFiles) -> float:
    """Least cosine between the graph's vectors and torch's."""
    tokenizer, tokens = load_tokenizer(files.folder, recipe), _Tokens(model)
    found = OnnxEmbedder(files).embed(_CHECKED)
    cosines = []
    for text, vector in zip(_CHECKED, found, strict=True):
        encoding = tokenizer.encode(recipe.prompt + text)
        inputs = (encoding.ids, encoding.attention_mask, encoding.type_ids)[: len(tokens.names)]
        with torch.inference_mode():
            own = recipe.pool(tokens(*(torch.tensor([ids]) for ids in inputs))[0].numpy())
        cosines.append(float(own @ vector / (np.linalg.norm(own) * np.linalg.norm(vector))))
    return min(cosines)


@contextmanager
def _quiet() -> Iterator[None]:
    """Exporters warn of what `_agreement` finds out."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
