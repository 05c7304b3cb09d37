"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.tiny_model import make_tiny_model

# The tiny models are faster on one thread, and pytest shares the machine with the processes it starts.
torch.set_num_threads(1)


def pytest_make_parametrize_id(val: object) -> str | None:
    """Bytes are named by their length: what gzip writes differs from second to second.

    Processes that share the tests out have to agree on their names.
    """
    return f"{len(val)}-bytes" if isinstance(val, bytes) else None


@pytest.fixture(scope="session", autouse=True)
def _a_coordinator_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands that tests start remember ledgers in a folder of the tests, not in the developer's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a random two-layer model of a family, with a tokenizer; made when it is first asked for."""
    return cache(lambda kind: make_tiny_model(tmp_path_factory.mktemp("models") / f"tiny-{kind}", kind))


@pytest.fixture(scope="session")
def tiny_model(tiny: Callable[[str], Path]) -> Path:
    """Folder of a random two-layer Llama with a tokenizer."""
    return tiny("llama")


@pytest.fixture(scope="session")
def tiny_gpt2(tiny: Callable[[str], Path]) -> Path:
    """Folder of a random two-layer GPT-2 with a tokenizer."""
    return tiny("gpt2")
