"""Models of real shapes with random weights, and documents for them; what one process takes up."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from client_strong.trainer import TrainingDocuments
from common.models.generator import Generator
from tests.tiny_model import make_tiny_model

VOCABULARY = 49_152


def random_documents(count: int, tokens: int) -> TrainingDocuments:
    """Random documents of equal length, all of whose tokens but the first are trained: nothing to leave out."""
    ids = np.random.default_rng(7).integers(VOCABULARY, size=(count, tokens)).tolist()
    units = np.arange(count + 1)
    return TrainingDocuments([row[:1] for row in ids], [row[1:] for row in ids], units[:-1], units)


def warm(generator: Generator) -> None:
    """Move B away from zero, where the gradients of A vanish."""
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in generator.trained.items():
            if "lora_B" in name:
                parameter.normal_(std=0.02, generator=source)


def random_model(folder: Path, name: str, *, layers: int | None = None) -> Path:
    """A model of the shapes of 'smollm2' or 'gpt2' in ``folder``; of fewer ``layers`` on demand."""
    if folder.exists():
        return folder
    # For its tokenizer; the model is overwritten.
    make_tiny_model(folder)
    torch.manual_seed(0)
    if name == "gpt2":
        config = GPT2Config(**({"n_layer": layers} if layers else {}))
        GPT2LMHeadModel(config).save_pretrained(folder)
    else:
        config = LlamaConfig(
            hidden_size=576, intermediate_size=1536, num_hidden_layers=layers or 30, num_attention_heads=9,
            num_key_value_heads=3, vocab_size=VOCABULARY, tie_word_embeddings=True, max_position_embeddings=8192,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def peak_above_now(step: Callable[[], object]) -> int:
    """Bytes that ``step`` takes at its height, above what is resident before it."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    # Sets the high-water mark back to what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    step()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines[name].split()[0])
