"""The app's folder is new, complete and ours. That no data gets into its bundle: tests/e2e/test_federation.py."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from common.errors import FederationError
from deploy.app import PACKAGES, stage_app


def test_the_staged_app_is_code_and_one_project_file(tmp_path: Path) -> None:
    app = stage_app(tmp_path)
    assert app == tmp_path / "fedcorpus"
    files = [path.relative_to(app) for path in app.rglob("*") if path.is_file()]
    assert {file.suffix for file in files} == {".py", ".toml"}
    assert [file for file in files if file.suffix == ".toml"] == [Path("pyproject.toml")]
    assert {file.parts[0] for file in files} == {*PACKAGES, "pyproject.toml"}
    assert not any("__pycache__" in file.parts for file in files)


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    checkout = tmp_path / "fedcorpus" / "common"
    checkout.mkdir(parents=True)
    (checkout / "notes.py").write_text("NOTE = 1")
    with pytest.raises(FederationError, match="exists already"):
        stage_app(tmp_path)
    assert [path.name for path in (tmp_path / "fedcorpus").rglob("*.py")] == ["notes.py"]


def test_a_strangers_package_of_the_same_name_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> ModuleSpec:
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(tmp_path / "elsewhere" / name)]
        return spec

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(FederationError, match=r"'server' is found in .*elsewhere"):
        stage_app(tmp_path)


def test_an_installed_wheel_stages_the_project_file_that_it_carries(tmp_path: Path) -> None:
    root, installed = Path(__file__).parents[2], tmp_path / "site-packages"
    for package in (*PACKAGES, "deploy"):
        shutil.copytree(root / package, installed / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pyproject.toml", installed / "deploy" / "app_pyproject.toml")
    (installed / "pyproject.toml").write_text("another project's")
    code = (
        f"import sys; sys.path.insert(0, {str(installed)!r}); from pathlib import Path\n"
        f"from deploy.app import stage_app; stage_app(Path({str(tmp_path)!r}))\n"
        "assert not {'server', 'client_strong', 'client_weak'} & set(sys.modules), 'found, not imported'"
    )
    subprocess.run([sys.executable, "-I", "-c", code], check=True)
    assert (tmp_path / "fedcorpus" / "pyproject.toml").read_text() == (root / "pyproject.toml").read_text()
