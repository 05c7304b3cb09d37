"""Stages the Flower app: the folder that ``flwr run`` bundles and every site receives. Only code goes in.

The app is copied file by file from the installed packages, so data that lies beside the source can't get into the
bundle, and Flower can't rewrite anything in the source tree.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from common.errors import FederationError

PACKAGES = ("server", "client_strong", "client_weak", "common")


def stage_app(destination: Path) -> Path:
    """Copy the app's ``*.py`` and its ``pyproject.toml`` into ``destination / "fedcorpus"`` and return that folder.

    Raises
    ------
    FederationError
        If a package or the ``pyproject.toml`` isn't installed.
    """
    app = destination / "fedcorpus"
    for package in PACKAGES:
        source = _package_folder(package)
        for file in sorted(source.rglob("*.py")):
            target = app / package / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
    shutil.copyfile(_pyproject(), app / "pyproject.toml")
    return app


def _package_folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise FederationError(f"package {package!r} isn't installed here; install fedcorpus")
    return Path(next(iter(spec.submodule_search_locations)))


def _pyproject() -> Path:
    """The project's own file in a checkout, or the copy that the wheel carries."""
    shipped = Path(__file__).parent / "app_pyproject.toml"
    checkout = _package_folder("common").parent / "pyproject.toml"
    for candidate in (checkout, shipped):
        if candidate.is_file():
            return candidate
    raise FederationError(f"neither {checkout} nor {shipped} is there; reinstall fedcorpus")
