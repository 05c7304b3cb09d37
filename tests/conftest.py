"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny_model import make_tiny_model

# The tiny models are faster on one thread, and pytest shares the machine with the processes it starts.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-layer Llama with a tokenizer."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-layer GPT-2 with a tokenizer."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-gpt2", "gpt2")
