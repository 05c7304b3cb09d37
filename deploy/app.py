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
        If that folder exists, or a package or the ``pyproject.toml`` isn't installed.
    """
    app = destination / "fedcorpus"
    if app.exists():
        # An older version's files in it would be bundled too; and it may be somebody's checkout.
        raise FederationError(f"{app} exists already; the app is staged into a new folder")
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
    folder = Path(next(iter(spec.submodule_search_locations))).resolve()
    expected = Path(__file__).resolve().parents[1] / package
    # 'server' and 'common' are everybody's names: a stranger's package on the path must not be sent to sites.
    if folder != expected:
        raise FederationError(f"package {package!r} is found in {folder}, not in {expected}; it isn't fedcorpus' own")
    return folder


def _pyproject() -> Path:
    """The copy that the wheel carries, or the project's own file in a checkout."""
    shipped = Path(__file__).parent / "app_pyproject.toml"
    checkout = _package_folder("common").parent / "pyproject.toml"
    # In this order: beside installed packages a careless wheel may have left its own pyproject.toml.
    for candidate in (shipped, checkout):
        if candidate.is_file():
            return candidate
    raise FederationError(f"neither {shipped} nor {checkout} is there; reinstall fedcorpus")
