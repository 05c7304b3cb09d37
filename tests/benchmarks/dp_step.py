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

import ctypes
import gc
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from client_strong import gradients as gradients_module
from client_strong import trainer
from client_strong.gradients import FusedGradients, OpacusGradients, PerSampleGradients
from client_strong.trainer import AdapterOptimizer, TrainingDocuments, noisy_gradient
from common.models import generator as generator_module
from common.models.generator import Batch, Generator
from common.privacy import noise
from common.privacy.accounting import DiscreteGaussian, StrongPlan, SubsampledGaussian
from common.privacy.noise import Csprng, LatticeGaussian
from common.study import Study
from tests.benchmarks.bars import Bar
from tests.hospitals import small_study
from tests.tiny_model import make_tiny_model

QUICK = bool(os.environ.get("FEDCORPUS_BENCH_QUICK"))
TURNS = int(os.environ.get("FEDCORPUS_BENCH_TURNS", "2" if QUICK else "9"))
DOCUMENTS, TOKENS, RANK = 16, 128, 16
VOCABULARY = 49_152

BARRED = ("plain", "fused")
COMPARED = ("plain", "fused-checkpointed", "opacus", "ghost", "lattice")
"""These take turns too, less often, as no limit hangs on them. ``lattice`` is a private step's part after the model."""

MEMORY_METHODS = ("plain", "fused", "fused-checkpointed", *(() if QUICK else ("plain-checkpointed", "opacus", "ghost")))

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
    figures = Figures()
    with tempfile.TemporaryDirectory() as folder:
        for setting in settings:
            base = _random_model(Path(folder) / setting.model, setting.model)
            _measure_time(figures, setting, base)
            _measure_memory(figures, setting, base)
    for setting in settings:
        yield from _report(figures, setting)
    figures.file.unlink()


class Figures:
    """What was measured so far, one JSON object a line. Bound to the code and libraries that were measured."""

    def __init__(self) -> None:
        digest = hashlib.sha256(f"{QUICK} {[version(name) for name in ('torch', 'transformers', 'peft')]}".encode())
        for module in (gradients_module, trainer, generator_module, noise, sys.modules[__name__]):
            digest.update(Path(str(module.__file__)).read_bytes())
        folder = Path(os.environ.get("FEDCORPUS_BENCH_FIGURES", tempfile.gettempdir()))
        self.file = folder / f"fedcorpus-dp-step-{digest.hexdigest()[:12]}.jsonl"
        self._lines: list[dict[str, Any]] = []
        if self.file.is_file():
            self._lines = [json.loads(line) for line in self.file.read_text().splitlines()]
        print(f"dp-step: figures in {self.file}, {len(self._lines)} so far", file=sys.stderr)

    def find(self, kind: str, setting: Setting) -> list[dict[str, Any]]:
        """Figures of one kind, in the order they were made."""
        return [line for line in self._lines if line["kind"] == kind and line["setting"] == asdict(setting)]

    def add(self, kind: str, setting: Setting, **values: Any) -> None:
        """Write one figure at once."""
        line = {"kind": kind, "setting": asdict(setting), **values}
        self._lines.append(line)
        with self.file.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        print(f"dp-step: {setting}: {kind} {values}", file=sys.stderr, flush=True)


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
        _warm(generator)
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
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
        _document_means(logits, batch.labels).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _recompute(function: Callable[..., Any], *arguments: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(function, *arguments, use_reentrant=False)


def _document_means(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """`document_losses` as a library computes them: over rows, which is faster than over the middle axis."""
    targets = labels[:, 1:]
    rows = logits[:, :-1].float().reshape(-1, logits.shape[-1])
    losses = torch.nn.functional.cross_entropy(rows, targets.reshape(-1), ignore_index=-100, reduction="none")
    return losses.view(targets.shape).sum(dim=1) / (targets != -100).sum(dim=1).clamp(min=1)


class _DocumentLoss(torch.nn.Module):
    reduction = "mean"

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = _document_means(logits, labels)
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
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
        criterion(logits, batch.labels).backward()
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


def _documents(count: int, tokens: int) -> TrainingDocuments:
    """Random documents of equal length, all of whose tokens but the first are trained: nothing to leave out."""
    ids = np.random.default_rng(7).integers(VOCABULARY, size=(count, tokens)).tolist()
    units = np.arange(count + 1)
    return TrainingDocuments([row[:1] for row in ids], [row[1:] for row in ids], units[:-1], units)


def _warm(generator: Generator) -> None:
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in generator.trained.items():
            if "lora_B" in name:
                parameter.normal_(std=0.02, generator=source)


def _random_model(folder: Path, name: str) -> Path:
    if folder.exists():
        return folder
    # For its tokenizer; the model is overwritten.
    make_tiny_model(folder)
    torch.manual_seed(0)
    if name == "gpt2":
        config = GPT2Config(**({"n_layer": 2} if QUICK else {}))
        GPT2LMHeadModel(config).save_pretrained(folder)
    else:
        config = LlamaConfig(
            hidden_size=576, intermediate_size=1536, num_hidden_layers=3 if QUICK else 30, num_attention_heads=9,
            num_key_value_heads=3, vocab_size=VOCABULARY, tie_word_embeddings=True, max_position_embeddings=2048,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


# How it is measured


def _measure_time(figures: Figures, setting: Setting, base: Path) -> None:
    for names, turns in ((BARRED, TURNS), (COMPARED, -(-TURNS // 4))):
        kind = f"seconds of {', '.join(names)}"
        done = len(figures.find(kind, setting))
        if done >= turns:
            continue
        methods = Methods(setting, base)
        shared = Generator(methods.study.generator)
        _warm(shared)
        # Opacus' wrapper stays on its model, so ghost clipping has one of its own.
        steps = {name: methods.make(name) if name == "ghost" else methods.on(shared)[name]() for name in names}
        small, batch = _documents(2, 8), _documents(DOCUMENTS, TOKENS)
        for step in steps.values():
            step(small)
        for turn in range(done, turns):
            cpu, wall = {}, {}
            for name in random.Random(turn).sample(names, len(names)):
                cpu_start, wall_start = time.process_time(), time.perf_counter()
                steps[name](batch)
                cpu[name], wall[name] = time.process_time() - cpu_start, time.perf_counter() - wall_start
            figures.add(kind, setting, cpu=cpu, wall=wall)


def _measure_memory(figures: Figures, setting: Setting, base: Path) -> None:
    done = {figure["method"] for figure in figures.find("memory", setting)}
    for method in MEMORY_METHODS:
        if method not in done:
            command = [sys.executable, "-m", __name__, setting.model, setting.dtype, method, str(base)]
            # The child must find this very code, wherever the run was started.
            root = str(Path(__file__).parents[2])
            # By itself, glibc keeps freed blocks of up to 32 MB in a heap that fragments: 1 GB that no tensor is in.
            environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
            answer = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            figures.add("memory", setting, method=method, peak=int(answer.stdout.split()[-1]))


def _peak_of_one_step(setting: Setting, method: str, base: Path) -> int:
    """Bytes that a step takes at its height, above the loaded model; run in a process of its own."""
    step = Methods(setting, base).make(method)
    batch = _documents(DOCUMENTS, TOKENS)
    step(_documents(2, 8))
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    # Sets the high-water mark back to what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    loaded = _status("VmRSS")
    step(batch)
    return _status("VmHWM") - loaded


def _status(name: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines[name].split()[0])


# What comes out


def _report(figures: Figures, setting: Setting) -> Iterable[Bar]:
    barred, compared = (figures.find(f"seconds of {', '.join(names)}", setting) for names in (BARRED, COMPARED))
    peaks = {figure["method"]: figure["peak"] for figure in figures.find("memory", setting)}
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
