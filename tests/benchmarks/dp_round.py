"""A training round as a hospital runs it: what it costs beside its steps, and what odd batches do to the steps.

Model of the shapes of SmolLM2-135M with random weights, LoRA of rank 16 on all linear layers, bfloat16, where steps are
fastest and everything else weighs most, one thread.

overhead     One request of 50 steps in a process of its own, as Flower starts one for every message: from the start of
             the interpreter, with loading libraries, documents and model, the self-test, the ledger and the reply. The
             steps take the time between the first one's end and the last one's, times 50 / 49.
outlier      A step on 16 documents of 128 tokens and one of 4,000, against the two steps on their own; they take turns.
over-batch   Peak memory of a step on four times as many documents as pass through the model at once.

``FEDCORPUS_BENCH_QUICK=1`` tries everything on three layers in a minute or two.
"""

from __future__ import annotations

import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.bars import Bar

QUICK = bool(os.environ.get("FEDCORPUS_BENCH_QUICK"))
TURNS = int(os.environ.get("FEDCORPUS_BENCH_TURNS", "2" if QUICK else "5"))
LAYERS = 3 if QUICK else None
STEPS, DOCUMENTS, TOKENS, OUTLIER = 5 if QUICK else 50, 16, 128, 4000

OVERHEAD_LIMIT, OUTLIER_LIMIT, MEMORY_LIMIT = 0.10, 1.05, 1.05


def run() -> Iterator[Bar]:
    """Measure all three, each in processes of its own."""
    name = "-quick" if QUICK else ""
    with tempfile.TemporaryDirectory() as folder:
        _in_a_process("model", folder)
        _in_a_process("request", folder)
        share, seconds = _in_a_process("round", folder)
        print(f"a round of {STEPS} steps: {seconds:.0f} CPU s, {share:.1%} of the steps' time beside them")
        yield Bar(f"dp-round-overhead{name}", share, OVERHEAD_LIMIT)
        (ratio,) = _in_a_process("outlier", folder)
        print(f"{DOCUMENTS} documents of {TOKENS} tokens and one of {OUTLIER}: {ratio:.3f} x the two on their own")
        yield Bar(f"dp-round-outlier{name}", ratio, OUTLIER_LIMIT)
        (one,), (four,) = _in_a_process("memory", folder, "1"), _in_a_process("memory", folder, "4")
        print(f"peak of one physical batch {one / 1e9:.2f} GB, of four {four / 1e9:.2f} GB")
        yield Bar(f"dp-round-over-batch-memory{name}", four / one, MEMORY_LIMIT)


def _in_a_process(what: str, folder: str, *more: str) -> list[float]:
    command = [sys.executable, "-m", __name__, what, folder, *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if what == "memory":
        # By itself, glibc keeps freed blocks of up to 32 MB in a heap that fragments.
        environment |= {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
    root = str(Path(__file__).parents[2])
    answer = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [float(word) for word in answer.stdout.split()]


def _study(folder: Path) -> Any:
    from common.study import Study
    from tests.hospitals import small_study

    changes: dict[str, dict[str, Any]] = {
        "generator": {"rank": 16, "alpha": 32.0, "lora": "plain", "max_tokens": TOKENS, "dtype": "bfloat16"},
        "training": {"rounds": 2, "steps": STEPS, "batch_size": DOCUMENTS},
        "federation": {"min_documents": 1000},
    }
    return Study.model_validate(small_study(folder / "model", **changes))


def _make_model(folder: Path) -> None:
    from tests.benchmarks.shapes import random_model

    random_model(folder / "model", "smollm2", layers=LAYERS)


def _make_request(folder: Path) -> None:
    """What the coordinator sends, and a hospital's documents: each is longer than is read of it."""
    from common.models.generator import Generator
    from common.protocol import TrainRequest
    from tests.hospitals import rows, write_site

    study = _study(folder)
    documents = [{**row, "text": f"{row['text']} " * 8} for row in rows(1200)]
    write_site(folder, "north", "strong", documents, size_class=1000)
    generator = Generator(study.generator)
    np.savez(folder / "adapter.npz", **{n: a.copy() for n, a in generator.adapter().items()})
    request = TrainRequest(study, "run", 1, {}, generator.frozen_sha256())
    (folder / "frozen").write_text(request.frozen_sha256)


def _round(folder: Path) -> list[float]:
    """One round through the door, in this process from its start."""
    from client_strong.client_app import prepared
    from common.protocol import TrainRequest
    from common.site.config import Site
    from common.site.door import Door

    ends = list[float]()

    class _Steps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "step" in record.getMessage():
                ends.append(time.process_time())

    logging.getLogger("fedcorpus.strong").addHandler(_Steps())
    logging.getLogger("fedcorpus.strong").setLevel(logging.INFO)
    adapter = dict(np.load(folder / "adapter.npz"))
    received = TrainRequest(_study(folder), "run", 1, adapter, (folder / "frozen").read_text()).to_records()
    request = TrainRequest.from_records(received)
    site = Site.load(folder / "sites" / "north.toml")
    Door(site).release(request, lambda: prepared(site, request)).to_records()
    total = time.process_time()
    steps = (ends[-1] - ends[0]) * STEPS / (STEPS - 1)
    return [(total - steps) / steps, total]


def _step(folder: Path) -> Callable[[Any], object]:
    import torch

    from client_strong.fused import FusedGradients
    from client_strong.trainer import AdapterOptimizer, noisy_gradient
    from common.models.generator import Generator
    from common.privacy.accounting import DiscreteGaussian, StrongPlan, SubsampledGaussian
    from common.privacy.noise import Csprng
    from tests.benchmarks.shapes import warm

    torch.set_num_threads(1)
    study = _study(folder)
    generator = Generator(study.generator)
    warm(generator)
    optimizer, gradients, randomness = AdapterOptimizer(generator, study), FusedGradients(generator), Csprng()
    plan = StrongPlan(SubsampledGaussian(1.0, 0.1, 1), DiscreteGaussian(4.0, 1), 8.0, 1e-4)

    def step(documents: Any) -> None:
        everyone = np.arange(len(documents.texts))
        optimizer.step(noisy_gradient(gradients, documents, everyone, study, plan, randomness))

    return step


def _outlier(folder: Path) -> list[float]:
    from client_strong.trainer import TrainingDocuments
    from tests.benchmarks.shapes import random_documents

    usual, long = random_documents(DOCUMENTS, TOKENS), random_documents(1, OUTLIER)
    units = np.arange(DOCUMENTS + 2)
    both = TrainingDocuments([*usual.prompts, *long.prompts], [*usual.texts, *long.texts], units[:-1], units)
    step, ratios = _step(folder), list[float]()
    step(random_documents(2, 8))
    for turn in range(TURNS):
        seconds = {}
        batches = {"usual": usual, "long": long, "both": both}
        for name in random.Random(turn).sample(sorted(batches), 3):
            start = time.process_time()
            step(batches[name])
            seconds[name] = time.process_time() - start
        ratios.append(seconds["both"] / (seconds["usual"] + seconds["long"]))
        print(f"dp-round: turn {turn + 1} of {TURNS}: {seconds}", file=sys.stderr)
    return [statistics.median(ratios)]


def _memory(folder: Path, times: int) -> list[float]:
    from tests.benchmarks.shapes import peak_above_now, random_documents

    step, batch = _step(folder), random_documents(times * DOCUMENTS, TOKENS)
    step(random_documents(2, 8))
    return [float(peak_above_now(lambda: step(batch)))]


if __name__ == "__main__":
    what, place = sys.argv[1], Path(sys.argv[2])
    if what == "memory":
        found = _memory(place, int(sys.argv[3]))
    else:
        doings = {"model": _make_model, "request": _make_request, "round": _round, "outlier": _outlier}
        found = doings[what](place) or []
    print(*found)
