"""Fixtures of the coordinator's tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="session")
def ending_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model that finds all tokens equally likely. With a tiny top-p it says the first one: the end."""
    folder = tmp_path_factory.mktemp("models") / "ending"
    shutil.copytree(tiny_model, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(folder)
    return folder
