"""A sentence-transformers model as an ONNX graph: a transformer's vectors at a site without torch.

    located = OnnxFiles.find("/models/all-MiniLM-L6-v2")
    OnnxEmbedder(located).embed(["The nurse was kind."])      # float32 (1, 384)

Texts are run one at a time. A graph of 8-bit integers scales numbers by the largest of all that it is given, so a
text's vector would depend on the texts beside it; and padding moves the last bits of any graph. Cores are kept busy by
as many texts, each on one thread.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import MissingExtraError, ModelError
from common.models.onnx_graph import external_files
from common.models.recipe import TOKENIZER, Recipe

GRAPHS = "onnx"
"""Folder inside a model's in which graphs lie; they may lie in the model's own, too."""

_USUAL = "model.onnx"
_OUTPUTS = ("last_hidden_state", "token_embeddings")
"""What exporters call the tokens' vectors."""

_KNOWN = frozenset({"input_ids", "attention_mask", "token_type_ids", "position_ids"})
"""Inputs that can be given."""

_INTEGERS: dict[str, type] = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}
_SILENT = 4


@dataclass(frozen=True)
class OnnxFiles:
    """One graph and the model's folder that it belongs to.

    Attributes
    ----------
    folder
        The model's: with the tokenizer and how vectors are pooled.
    graph
        Path of the graph, in ``folder`` or in its subfolder `GRAPHS`.
    """

    folder: Path
    graph: Path

    @classmethod
    def find(cls, model: str) -> OnnxFiles:
        """The graph that a path means: a graph, or a folder's ``model.onnx``, or else the only one in it.

        Raises
        ------
        ModelError
            If there is none, or it isn't clear which is meant.
        MissingExtraError
            If the libraries that run it aren't installed.
        """
        if not model:
            raise ModelError("voting.embedder 'onnx' needs a folder or an .onnx file after a colon")
        if any(importlib.util.find_spec(library) is None for library in ("onnxruntime", "tokenizers")):
            raise MissingExtraError(
                "voting.embedder asks for onnxruntime and tokenizers, which aren't both installed; "
                "pip install 'fedcorpus[onnx]'"
            )
        path = Path(model)
        graph = path if path.suffix == ".onnx" else _only_graph(path)
        if not graph.is_file():
            raise ModelError(f"voting.embedder: no file {str(graph)!r}; a folder with an ONNX graph or one is accepted")
        return cls(graph.parent.parent if graph.parent.name == GRAPHS else graph.parent, graph)

    @property
    def names(self) -> list[str]:
        """Files that decide what a text's vector is, relative to the folder. Raises ModelError."""
        beside = [self.graph, *(self.graph.parent / name for name in external_files(self.graph))]
        return [*Recipe.of(self.folder).files, *(file.relative_to(self.folder).as_posix() for file in beside)]


class OnnxEmbedder:
    """Runs a graph, each text for itself.

    Parameters
    ----------
    files
        The graph and its folder.
    threads
        Texts that are run at once; as many as there are cores, if unset.

    Raises
    ------
    ModelError
        If the graph can't be run, or isn't one of a sentence-transformers model.
    """

    def __init__(self, files: OnnxFiles, *, threads: int | None = None) -> None:
        self._recipe = Recipe.of(files.folder)
        self._threads = threads or _cores()
        self._graph = files.graph
        external_files(files.graph)
        self._tokenizer = load_tokenizer(files.folder, self._recipe)
        self._session = _session(files.graph)
        self._inputs = self._known_inputs()
        self._output = self._tokens_output()
        # What can't be run at all is told before anything is spent.
        self.dimension = self._vector(".").size

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors, float32 of shape ``(texts, dimension)``; private where the texts are.

        Raises
        ------
        ModelError
            If the graph fails on a text; the sentence says nothing of it.
        """
        vectors = np.zeros((len(texts), self.dimension), dtype=np.float32)

        def fill(index: int) -> None:
            vectors[index] = self._vector(texts[index])

        with ThreadPoolExecutor(self._threads) as pool:
            for _ in pool.map(fill, range(len(texts))):
                pass
        return vectors

    def _vector(self, text: str) -> NDArray[np.float32]:
        return self._recipe.pool(self._tokens(self._tokenizer.encode(self._recipe.prompt + text)))

    def _tokens(self, encoding: Any) -> NDArray[Any]:
        """Vectors of one text's tokens, ``(tokens, dimension)``."""
        count = len(encoding.ids)
        values = {
            "input_ids": encoding.ids,
            "token_type_ids": encoding.type_ids,
            # Nothing is padded, so every token is looked at.
            "attention_mask": [1] * count,
            "position_ids": range(count),
        }
        given: dict[str, NDArray[Any]] = {
            name: np.array([values[name]], dtype=dtype) for name, dtype in self._inputs.items()
        }
        try:
            (found,) = self._session.run([self._output], given)
            tokens = np.asarray(found)
        except Exception:  # noqa: BLE001
            # Its own words may name a token of the text.
            raise self._refusal("can't be run on one of the texts") from None
        if tokens.ndim != 3 or tokens.shape[:2] != (1, count) or not count:
            raise self._refusal("doesn't give one vector for each token of a text")
        return np.asarray(tokens[0])

    def _known_inputs(self) -> dict[str, type]:
        """What the graph asks for, and of which integers."""
        inputs: dict[str, str] = {put.name: put.type for put in self._session.get_inputs()}
        known = {name: _INTEGERS[kind] for name, kind in inputs.items() if name in _KNOWN and kind in _INTEGERS}
        if len(known) != len(inputs) or "input_ids" not in known:
            raise self._refusal(f"asks for {sorted(inputs)}; integers for some of {sorted(_KNOWN)} can be given")
        return known

    def _tokens_output(self) -> str:
        shapes: dict[str, list[Any]] = {put.name: put.shape for put in self._session.get_outputs()}
        named = [name for name in _OUTPUTS if name in shapes]
        found = named[:1] or [name for name, shape in shapes.items() if len(shape or ()) == 3]
        if len(found) != 1:
            raise self._refusal(f"gives {sorted(shapes)}; one of {list(_OUTPUTS)}, vectors of all tokens, is needed")
        return found[0]

    def _refusal(self, problem: str) -> ModelError:
        return ModelError(f"voting.embedder: the graph {str(self._graph)!r} {problem}")


def runtime() -> Any:
    """The library that runs graphs, which then reports nothing."""
    # Its builds from 1.29 on report to their maker unless this is set before they are imported. pyproject.toml asks for
    # one that can't, but an operator may have another.
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    import onnxruntime

    return onnxruntime


def load_tokenizer(folder: Path, recipe: Recipe) -> Any:
    """The tokenizer of a model's folder, that cuts as the model does and pads nothing. Raises ModelError."""
    from tokenizers import Tokenizer, normalizers

    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as cause:
        raise ModelError(f"model {str(folder)!r}: {TOKENIZER} can't be read as a tokenizer") from cause
    # A folder's own settings are those of its training.
    tokenizer.no_padding()
    tokenizer.enable_truncation(recipe.most_tokens)
    if recipe.lower_case:
        others = [tokenizer.normalizer] if tokenizer.normalizer else []
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *others])
    return tokenizer


def _only_graph(folder: Path) -> Path:
    places = (folder, folder / GRAPHS)
    found = sorted(file for place in places for file in place.glob("*.onnx"))
    usual = [file for file in found if file.name == _USUAL] or found
    if len(usual) == 1:
        return usual[0]
    if not usual:
        raise ModelError(
            f"voting.embedder: no ONNX graph in {str(folder)!r}; 'fedcorpus embedder' makes one of a "
            "sentence-transformers folder"
        )
    names = [file.relative_to(folder).as_posix() for file in usual]
    raise ModelError(
        f"voting.embedder: {str(folder)!r} holds {len(names)} ONNX graphs ({', '.join(names)}); name one, "
        f"as 'onnx:{folder / names[0]}'"
    )


def _session(graph: Path) -> Any:
    onnxruntime = runtime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.use_deterministic_compute = True
    # Texts differ in length: memory that is kept for the next would only grow.
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    # Its errors may name tokens of a text, and it writes them to standard error.
    options.log_severity_level = _SILENT
    try:
        return onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    except Exception as cause:
        raise ModelError(f"voting.embedder: the graph {str(graph)!r} can't be loaded by onnxruntime") from cause


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
