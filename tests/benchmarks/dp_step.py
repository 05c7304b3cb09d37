"""A DP-SGD step against the same step without privacy: seconds and memory.

16 documents of 128 tokens, LoRA of rank 16 on all linear layers, A and B trained, one thread. Models have the shapes of
SmolLM2-135M and GPT-2-124M and random weights. The plain step is the one a user would write: peft's forward and
backward pass, the mean of the documents' losses, Adam. Methods take turns in one process, and ratios are taken within
a turn, of CPU seconds: other people's work on the machine then weighs on all of them alike.

The whole takes over an hour. Figures go to a file as they come, so a run that was killed goes on where it stopped; when
it is through, the file is deleted. ``FEDCORPUS_BENCH_TURNS`` says how often plain and private steps take turns (9), and
``FEDCORPUS_BENCH_QUICK=1`` tries everything in two minutes, on a few layers of one model: ratios of such a model are
not those of a whole one.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from client_strong import fused, head_losses, products, trainer
from client_strong import gradients as gradients_module
from client_strong.fused import FusedGradients
from client_strong.gradients import OpacusGradients, PerSampleGradients
from client_strong.trainer import AdapterOptimizer, TrainingDocuments, noisy_gradient
from common.models import architectures
from common.models import generator as generator_module
from common.models.generator import Batch, Generator
from common.privacy import noise
from common.privacy.accounting import DiscreteGaussian, StrongPlan, SubsampledGaussian
from common.privacy.noise import Csprng, LatticeGaussian
from common.study import Study
from tests.benchmarks import shapes
from tests.benchmarks.bars import Bar
from tests.benchmarks.figures import Figures
from tests.benchmarks.shapes import peak_above_now, random_documents, random_model, warm
from tests.hospitals import small_study

QUICK = bool(os.environ.get("FEDCORPUS_BENCH_QUICK"))
TURNS = int(os.environ.get("FEDCORPUS_BENCH_TURNS", "2" if QUICK else "9"))
DOCUMENTS, TOKENS, RANK = 16, 128, 16
VOCABULARY = 49_152

BARRED = ("plain", "fused")
COMPARED = ("plain", "fused-checkpointed", "opacus", "ghost", "lattice")
"""These take turns too, less often, as no limit hangs on them. ``lattice`` is a private step's part after the model."""

MEMORY_METHODS = ("plain", "fused", "fused-checkpointed", *(() if QUICK else ("plain-checkpointed", "opacus", "ghost")))

MEASURED = (
    gradients_module, fused, head_losses, products, trainer, architectures, generator_module, noise, shapes,
    sys.modules[__name__],
)  # fmt: skip
TIME_LIMITS = {"smollm2": 0.90, "gpt2": 0.95}
MEMORY_LIMIT, CHECKPOINTED_LIMIT = 0.80, 0.20


@dataclass(frozen=True)
class Setting:
    """What is trained, and in which number format."""

    model: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.model} {self.dtype}"


SETTINGS = [Setting(model, dtype) for model in TIME_LIMITS for dtype in ("float32", "bfloat16")]


def run() -> Iterator[Bar]:
    """Measure what the file of figures lacks, print a table, give the bars."""
    settings = SETTINGS[:1] if QUICK else SETTINGS
    figures = Figures("dp-step", MEASURED, f"{QUICK}")
    with tempfile.TemporaryDirectory() as folder:
        for setting in settings:
            base = random_model(Path(folder) / setting.model, setting.model, layers=3 if QUICK else None)
            _measure_time(figures, setting, base)
            _measure_memory(figures, setting, base)
    for setting in settings:
        yield from _report(figures, setting)
    figures.file.unlink()


# What is measured


class Methods:
    """One step of each kind, on a batch of ``documents`` documents."""

    def __init__(self, setting: Setting, base: Path) -> None:
        torch.set_num_threads(1)
        changes: dict[str, dict[str, Any]] = {
            "generator": {
                "rank": RANK, "alpha": 2.0 * RANK, "lora": "plain", "max_tokens": TOKENS, "dtype": setting.dtype,
            },
            "training": {"batch_size": DOCUMENTS},
            "privacy": {"max_grad_norm": 1.0},
        }  # fmt: skip
        self.study = Study.model_validate(small_study(base, **changes))

    def make(self, name: str) -> Callable[[TrainingDocuments], object]:
        """A method's step, with a model of its own where it leaves something on it."""
        generator = Generator(self.study.generator)
        warm(generator)
        return self.on(generator)[name]()

    def on(self, generator: Generator) -> dict[str, Callable[[], Callable[[TrainingDocuments], object]]]:
        """Makers of all methods' steps on one model."""
        return {
            "plain": lambda: _plain(generator),
            "plain-checkpointed": lambda: _plain(generator, checkpointing=True),
            "fused": lambda: self._private(generator, FusedGradients(generator)),
            "fused-checkpointed": lambda: self._private(generator, FusedGradients(generator, checkpointing=True)),
            "opacus": lambda: self._private(generator, OpacusGradients(generator)),
            "ghost": lambda: _ghost(generator),
            "lattice": lambda: _lattice(generator),
        }

    def _private(self, generator: Generator, gradients: PerSampleGradients) -> Callable[[TrainingDocuments], object]:
        optimizer, randomness = AdapterOptimizer(generator, self.study), Csprng()
        plan = StrongPlan(SubsampledGaussian(1.0, 0.1, 1), DiscreteGaussian(4.0, 1), 8.0, 1e-4)

        def step(documents: TrainingDocuments) -> None:
            everyone = np.arange(len(documents.texts))
            optimizer.step(noisy_gradient(gradients, documents, everyone, self.study, plan, randomness))  # type: ignore[arg-type,unused-ignore]

        return step


def _plain(generator: Generator, *, checkpointing: bool = False) -> Callable[[TrainingDocuments], object]:
    model, optimizer = generator.model, torch.optim.Adam(generator.trained.values(), lr=1e-4)
    model.train()
    if checkpointing:
        model.get_base_model()._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=_recompute)

    def step(documents: TrainingDocuments) -> None:
        batch = Batch(documents.prompts, documents.texts)
        logits = model(**batch.inputs, use_cache=False).logits
        _document_means(logits, batch.targets).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _recompute(function: Callable[..., Any], *arguments: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(function, *arguments, use_reentrant=False)


def _document_means(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """`document_losses` as a library computes them: over rows, which is faster than over the middle axis."""
    rows = logits.float().reshape(-1, logits.shape[-1])
    losses = torch.nn.functional.cross_entropy(rows, targets.reshape(-1), ignore_index=-100, reduction="none")
    return losses.view(targets.shape).sum(dim=1) / (targets != -100).sum(dim=1).clamp(min=1)


class _DocumentLoss(torch.nn.Module):
    reduction = "mean"

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = _document_means(logits, targets)
        return losses if self.reduction == "none" else losses.mean()


def _ghost(generator: Generator) -> Callable[[TrainingDocuments], object]:
    """Opacus' own step with ghost clipping, its sum in floating point and its noise from torch's generator."""
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    generator.model.train()
    model = GradSampleModuleFastGradientClipping(
        generator.model, loss_reduction="mean", strict=False, max_grad_norm=1.0, use_ghost_clipping=True
    )
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.Adam(generator.trained.values(), lr=1e-4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=DOCUMENTS,
    )
    criterion = DPLossFastGradientClipping(model, optimizer, _DocumentLoss(), loss_reduction="mean")

    def step(documents: TrainingDocuments) -> None:
        batch = Batch(documents.prompts, documents.texts)
        logits = model(**batch.inputs, use_cache=False).logits
        criterion(logits, batch.targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _lattice(generator: Generator) -> Callable[[TrainingDocuments], object]:
    """The part of a private step that is not the model's: clip, cut, sum, noise."""
    dimension = sum(p.numel() for p in generator.trained.values())
    gradient = np.random.default_rng(0).standard_normal(dimension).astype(np.float32)
    randomness = Csprng()

    def step(documents: TrainingDocuments) -> None:
        total = LatticeGaussian(dimension, max_grad_norm=1.0, noise_multiplier=1.0, randomness=randomness)
        for _ in documents.texts:
            total.add(gradient)
        total.release(normaliser=DOCUMENTS)

    return step


# How it is measured


def _measure_time(figures: Figures, setting: Setting, base: Path) -> None:
    for names, turns in ((BARRED, TURNS), (COMPARED, -(-TURNS // 4))):
        kind = f"seconds of {', '.join(names)}"
        done = len(figures.find(kind, **asdict(setting)))
        if done >= turns:
            continue
        methods = Methods(setting, base)
        shared = Generator(methods.study.generator)
        warm(shared)
        # Opacus' wrapper stays on its model, so ghost clipping has one of its own.
        steps = {name: methods.make(name) if name == "ghost" else methods.on(shared)[name]() for name in names}
        small, batch = random_documents(2, 8), random_documents(DOCUMENTS, TOKENS)
        for step in steps.values():
            step(small)
        for turn in range(done, turns):
            cpu, wall = {}, {}
            for name in random.Random(turn).sample(names, len(names)):
                cpu_start, wall_start = time.process_time(), time.perf_counter()
                steps[name](batch)
                cpu[name], wall[name] = time.process_time() - cpu_start, time.perf_counter() - wall_start
            figures.add(kind, asdict(setting), cpu=cpu, wall=wall)


def _measure_memory(figures: Figures, setting: Setting, base: Path) -> None:
    done = {figure["method"] for figure in figures.find("memory", **asdict(setting))}
    for method in MEMORY_METHODS:
        if method not in done:
            command = [sys.executable, "-m", __name__, setting.model, setting.dtype, method, str(base)]
            # The child must find this very code, wherever the run was started.
            root = str(Path(__file__).parents[2])
            # By itself, glibc keeps freed blocks of up to 32 MB in a heap that fragments: 1 GB that no tensor is in.
            environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
            answer = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            figures.add("memory", asdict(setting), method=method, peak=int(answer.stdout.split()[-1]))


def _peak_of_one_step(setting: Setting, method: str, base: Path) -> int:
    """Bytes that a step takes at its height, above the loaded model; run in a process of its own."""
    step = Methods(setting, base).make(method)
    batch = random_documents(DOCUMENTS, TOKENS)
    step(random_documents(2, 8))
    return peak_above_now(lambda: step(batch))


# What comes out


def _report(figures: Figures, setting: Setting) -> Iterable[Bar]:
    which = asdict(setting)
    barred, compared = (figures.find(f"seconds of {', '.join(names)}", **which) for names in (BARRED, COMPARED))
    peaks = {figure["method"]: figure["peak"] for figure in figures.find("memory", **which)}
    print(f"\n{setting}, {len(barred)} turns ({len(compared)} of those that no limit hangs on)")
    print(f"{'method':20}{'CPU s':>8}{'x plain':>9}{'wall x':>8}{'peak GB':>9}{'x plain':>9}")
    for method in dict.fromkeys([*BARRED, *COMPARED, *peaks]):
        turns = barred if method in BARRED else compared
        seconds = " " * 25
        if method in turns[0]["cpu"]:
            median = statistics.median(turn["cpu"][method] for turn in turns)
            seconds = f"{median:8.2f}{_ratio(turns, 'cpu', method):9.3f}{_ratio(turns, 'wall', method):8.3f}"
        memory = f"{peaks[method] / 1e9:9.2f}{peaks[method] / peaks['plain']:9.3f}" if method in peaks else ""
        print(f"{method:20}{seconds}{memory}")
    name = f"{setting.model}-{setting.dtype}" + ("-quick" if QUICK else "")
    yield Bar(f"dp-step-time-{name}", _ratio(barred, "cpu", "fused"), TIME_LIMITS[setting.model])
    yield Bar(f"dp-step-memory-{name}", peaks["fused"] / peaks["plain"], MEMORY_LIMIT)
    yield Bar(f"dp-step-memory-checkpointed-{name}", peaks["fused-checkpointed"] / peaks["plain"], CHECKPOINTED_LIMIT)


def _ratio(turns: list[dict[str, Any]], clock: str, method: str) -> float:
    return statistics.median(turn[clock][method] / turn[clock]["plain"] for turn in turns)


if __name__ == "__main__":
    print(_peak_of_one_step(Setting(*sys.argv[1:3]), sys.argv[3], Path(sys.argv[4])))
