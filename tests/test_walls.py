"""Import walls hold, and would be noticed if they didn't."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("server", "client_strong", "client_weak", "common", "deploy")


def _lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache", "--no-logo"]
    return subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=False
    )


def test_the_walls_hold() -> None:
    result = _lint(ROOT)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("common/study.py", "import server.census"),
        ("common/site/door.py", "import client_weak.votes"),
        ("client_strong/trainer.py", "import client_weak.votes"),
        ("client_weak/votes.py", "import client_strong.trainer"),
        ("client_weak/votes.py", "import torch"),
        ("client_weak/client_app.py", "import common.models.generator"),
        ("server/census.py", "import client_weak.votes"),
        ("server/census.py", "import deploy.local"),
        ("common/privacy/noise.py", "import common.study"),
        ("common/privacy/noise.py", "import flwr"),
        ("common/site/documents.py", "import torch"),
        ("deploy/local.py", "import server.census"),
    ],
)
def test_a_planted_import_across_a_wall_is_noticed(tmp_path: Path, file: str, line: str) -> None:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / file).open("a", encoding="utf-8") as source:
        source.write(f"\n{line}\n")
    result = _lint(tmp_path)
    assert result.returncode != 0
    assert "BROKEN" in result.stdout, result.stdout + result.stderr
