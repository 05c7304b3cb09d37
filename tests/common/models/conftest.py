"""Fixtures of the embedders' tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from server.onnx_export import export_embedder
from tests.tiny_embedder import make_tiny_embedder


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny sentence-transformers folder."""
    return make_tiny_embedder(tmp_path_factory.mktemp("plain") / "tiny")


@pytest.fixture(scope="session")
def exported(plain: Path) -> dict[str, Path]:
    """The same with an ONNX graph, in 32-bit numbers ('float') and in 8-bit integers ('int8')."""
    for kind in ("float", "int8"):
        export_embedder(plain, plain.parent / kind, int8=kind == "int8")
    return {kind: plain.parent / kind for kind in ("float", "int8")}


@pytest.fixture
def folder(exported: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of 'float' that a test may change."""
    return Path(shutil.copytree(exported["float"], tmp_path / "model"))
