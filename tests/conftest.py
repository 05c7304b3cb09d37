"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.tiny_model import make_tiny_model

# The tiny models are faster on one thread, and pytest shares the machine with the processes it starts.
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _a_coordinator_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands that tests start remember ledgers in a folder of the tests, not in the developer's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-layer Llama with a tokenizer."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-layer GPT-2 with a tokenizer."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-gpt2", "gpt2")
