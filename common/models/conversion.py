"""A model that comes as GGUF is converted once and kept; a kept one that was damaged is noticed and made anew."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from common.errors import ModelError
from common.models.manifest import RECORDED, Manifest

log = logging.getLogger("fedcorpus.models")


def converted(gguf: Path, sha256: str, convert: Callable[[Path, Path], None]) -> Path:
    """Folder of the converted model, its files as they were when they were written.

    The folder is named after what it was made from. That it still is what was written is checked against a manifest
    beside it: this finds damage, not a person who may write there. Processes that want the same model at the same time
    convert it once, and the others wait.

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
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _alone(cache / ".lock"):
            # Another process may have made it meanwhile.
            if not _is_whole(target):
                _make(gguf, target, convert)
    except OSError as cause:
        raise ModelError(f"{target}: the converted model can't be put there ({cause.strerror})") from cause
    return target


def _make(gguf: Path, target: Path, convert: Callable[[Path, Path], None]) -> None:
    with tempfile.TemporaryDirectory(prefix=".building-", dir=target.parent) as folder:
        building = Path(folder) / "new"
        building.mkdir()
        convert(gguf, building)
        (building / RECORDED).write_text(Manifest.of(building).text, encoding="utf-8")
        if target.exists():
            log.warning("%s: the converted model was damaged; it is made anew", target)
            # A process that reads from it keeps what it has opened.
            target.rename(Path(folder) / "damaged")
        building.rename(target)


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process at a time; the lock of one that dies is free."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_whole(folder: Path) -> bool:
    try:
        return Manifest.recorded(folder) == Manifest.of(folder)
    except ModelError:
        return False
