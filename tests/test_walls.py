"""Import walls hold, and would be noticed if they didn't."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("server", "client_strong", "client_weak", "common", "deploy")
PRIVACY_MAY_IMPORT = {
    *("__future__", "collections", "dataclasses", "functools", "math", "os", "typing"),
    *("cryptography", "dp_accounting", "numpy", "opendp", "scipy"),
    *("common.errors", "common.privacy"),
}
"""All that an auditor of common/privacy has to know; closed, so that nothing that reads or sends slips in."""

ARROWS, PRIVACY = "Arrows point to common", "common/privacy is auditable alone"
TORCH, GENERATOR = "torch stays with the generator", "The generator stays with"


def test_the_walls_hold() -> None:
    result = _lint(ROOT)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("common/study.py", "import server.census", ARROWS),
        ("common/study.py", "import deploy.local", ARROWS),
        ("common/site/door.py", "import client_weak.votes", ARROWS),
        ("common/client_app.py", "import client_strong.client_app", ARROWS),
        ("client_strong/trainer.py", "import client_weak.votes", ARROWS),
        ("client_strong/trainer.py", "import server.census", ARROWS),
        ("client_strong/trainer.py", "import deploy.local", ARROWS),
        ("client_weak/votes.py", "import client_strong.trainer", ARROWS),
        ("client_weak/votes.py", "import server.census", ARROWS),
        ("server/census.py", "import client_weak.votes", ARROWS),
        ("server/census.py", "import deploy.local", ARROWS),
        ("deploy/local.py", "import server.census", ARROWS),
        ("deploy/local.py", "import client_strong.trainer", ARROWS),
        ("common/privacy/noise.py", "import common.study", PRIVACY),
        ("common/privacy/noise.py", "import common.logs", PRIVACY),
        ("common/privacy/noise.py", "import flwr", PRIVACY),
        ("common/errors.py", "import common.logs", PRIVACY),
        ("common/__init__.py", "import torch", TORCH),
        ("common/models/__init__.py", "import transformers", TORCH),
        ("common/site/documents.py", "import torch", TORCH),
        ("common/privacy/noise.py", "import opacus", TORCH),
        ("client_weak/votes.py", "import peft", TORCH),
        ("deploy/local.py", "import torch", TORCH),
        ("client_weak/client_app.py", "import common.models.generator", GENERATOR),
        ("common/site/documents.py", "import common.models.generator", GENERATOR),
        ("common/site/documents.py", "import common.models.architectures", GENERATOR),
        ("common/models/manifest.py", "import common.models.architectures", GENERATOR),
        ("common/models/manifest.py", "import torch", TORCH),
        ("common/models/lora.py", "import torch", TORCH),
    ],
)
def test_a_planted_import_across_a_wall_is_noticed(tmp_path: Path, file: str, line: str, contract: str) -> None:
    result = _lint_with(tmp_path, file, line)
    assert result.returncode != 0
    broken = [said for said in result.stdout.splitlines() if " BROKEN" in said]
    assert any(said.startswith(contract) for said in broken), result.stdout + result.stderr


def test_a_new_module_is_behind_the_wall(tmp_path: Path) -> None:
    assert "BROKEN" in _lint_with(tmp_path, "common/brand_new.py", "import torch").stdout


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("client_strong/client_app.py", "import torch"),
        ("server/census.py", "import common.models.generator"),
        ("common/models/architectures.py", "import torch"),
        ("client_weak/votes.py", "import common.study"),
    ],
)
def test_an_import_that_is_allowed_breaks_nothing(tmp_path: Path, file: str, line: str) -> None:
    result = _lint_with(tmp_path, file, line)
    assert result.returncode == 0, result.stdout


def test_privacy_imports_nothing_but_what_is_listed() -> None:
    assert _foreign_imports_of_privacy(ROOT) == set()


@pytest.mark.parametrize(
    ("line", "foreign"),
    [
        ("import requests", "requests"),
        ("from urllib.request import urlopen", "urllib.request"),
        ("import pathlib", "pathlib"),
        ("import importlib", "importlib"),
        ("from common import logs", "common.logs"),
        ("from ..site import door", "relative import"),
    ],
)
def test_a_foreign_import_in_privacy_is_noticed(tmp_path: Path, line: str, foreign: str) -> None:
    _copy_with(tmp_path, "common/privacy/noise.py", f"def _f() -> None:\n    {line}")
    assert _foreign_imports_of_privacy(tmp_path) == {foreign}


def _lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache", "--no-logo"]
    return subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=False
    )


def _lint_with(folder: Path, file: str, line: str) -> subprocess.CompletedProcess[str]:
    _copy_with(folder, file, line)
    return _lint(folder)


def _copy_with(folder: Path, file: str, code: str) -> None:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    with (folder / file).open("a", encoding="utf-8") as source:
        source.write(f"\n{code}\n")


def _foreign_imports_of_privacy(folder: Path) -> set[str]:
    return {
        name
        for file in (folder / "common" / "privacy").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        for name in _imported(node)
        if not any(name == allowed or name.startswith(f"{allowed}.") for allowed in PRIVACY_MAY_IMPORT)
    }


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    if node.level or node.module is None:
        return ["relative import"]
    # `from common import x` names a module of ours; elsewhere what follows is a name inside the module.
    return [f"common.{alias.name}" for alias in node.names] if node.module == "common" else [node.module]
