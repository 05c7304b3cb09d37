"""A model that comes as GGUF is converted once and kept; a kept one that was damaged is noticed and made anew."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from common.errors import ModelError
from common.models.manifest import RECORDED, Manifest

log = logging.getLogger("fedcorpus.models")


def converted(gguf: Path, sha256: str, convert: Callable[[Path, Path], None]) -> Path:
    """Folder of the converted model, its files as they were when they were written.

    The folder is named after what it was made from. That it still is what was written is checked against a manifest
    beside it: this finds damage, not a person who may write there.

    Parameters
    ----------
    gguf
        The model.
    sha256
        Of its bytes, in hexadecimal.
    convert
        Writes the model ``gguf`` into a folder, in Hugging Face format.

    Raises
    ------
    ModelError
        If the cache can't be written to.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedcorpus" / "models"
    target = cache / f"gguf-{sha256}"
    if _is_whole(target):
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=cache) as folder:
        building = Path(folder) / "new"
        building.mkdir()
        convert(gguf, building)
        (building / RECORDED).write_text(Manifest.of(building).text, encoding="utf-8")
        if target.exists():
            log.warning("%s: the converted model was damaged; it is made anew", target)
            # A process that reads from it keeps what it has opened.
            with contextlib.suppress(OSError):
                target.rename(Path(folder) / "damaged")
        try:
            building.rename(target)
        except OSError as cause:
            # Another process may have been first; its folder holds the same model.
            if not _is_whole(target):
                raise ModelError(f"{target}: the converted model can't be put there ({cause.strerror})") from cause
    return target


def _is_whole(folder: Path) -> bool:
    try:
        return Manifest.recorded(folder) == Manifest.of(folder)
    except ModelError:
        return False
