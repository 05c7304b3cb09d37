"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-layer Llama with a tokenizer."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-layer GPT-2 with a tokenizer."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-gpt2", "gpt2")
