"""What is in a bundle: its files, its columns, and the list of its files by which a change is noticed."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from common.codes import ControlCodes
from server.corpus import attribute_columns

CARD = "README.md"
WORDS = "PRIVACY.md"
STATEMENT = "privacy_statement.json"
FACTS = "bundle.json"
CROISSANT = "croissant.json"
STUDY = "study.json"
JSON_LINES = "data.jsonl.gz"
SHARDS = "data/train-*.parquet"
PUBLIC_KEY = "signing_key.pub"
MANIFEST = "MANIFEST.sha256"
SIGNATURE = "MANIFEST.sha256.sig"

VERSION = 1
"""Of the layout: files, columns, the card and croissant.json. A change of one of them is a new version."""

SAMPLES = 3
"""Texts that the card shows."""
SAMPLE_CHARACTERS = 300

MOST_LINE = 16 << 20
"""Bytes of a row in JSON lines: many times the longest text that a study may ask for."""

OWN_COLUMNS = ("id", "text", "weight")

_LINE = re.compile(r"([0-9a-f]{64})  ([\x21-\x5b\x5d-\x7e]+)")
"""As sha256sum writes one; no name of ours has blanks, backslashes or more than ASCII."""


class Publication(BaseModel):
    """What only the coordinator knows of the bundle."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str = Field(max_length=200, description="Title of the data set. Default: the study's name.")
    license: str = Field(
        default="unknown",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9.+-]{0,63}$",
        description="Licence of the corpus, by its SPDX name, such as CC-BY-4.0.",
    )
    language: str | None = Field(
        default=None, pattern=r"^[a-z]{2,3}$", description="Language of the texts, by its ISO 639 code, such as en."
    )
    publisher: str | None = Field(default=None, max_length=200, description="Who publishes it.")

    @field_validator("title", "publisher")
    @classmethod
    def _is_one_line(cls, value: str | None) -> str | None:
        if value is not None and not (value.strip() and value.isprintable()):
            raise ValueError("has no visible text, or line breaks; one line is accepted")
        return value


class Facts(Publication):
    """What a program may want to know of a bundle (``bundle.json``)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: Literal["fedcorpus bundle"] = Field(description="What this file is.")
    version: Literal[1] = Field(description="Version of the layout.")
    study: str = Field(description="Name of the study.")
    study_sha256: str = Field(description="SHA-256 of the study in canonical JSON.")
    run_id: str = Field(description="Name of the run.")
    date: str = Field(pattern=r"^\d{4}-\d\d-\d\d$", description="Day on which the run was finished (UTC).")
    texts: int = Field(ge=0, description="Texts in the corpus.")
    shards: int = Field(ge=1, le=99_999, description="Parquet files.")
    columns: tuple[str, ...] = Field(description="Columns of both formats.")
    parquet_bytes: int = Field(ge=0, description="Size of all Parquet files.")
    memory_bytes: int = Field(ge=0, description="Size of the texts in memory, by Arrow.")
    missing: dict[str, int] = Field(description="Control codes with fewer texts than wanted, and how many are missing.")
    signing_key: str | None = Field(description="Fingerprint of the key that signs the bundle; null if none does.")
    software: dict[str, str] = Field(description="Versions that made the corpus.")


def columns(codes: ControlCodes) -> tuple[str, ...]:
    """Columns of both formats: id, text, one for each attribute, weight."""
    return ("id", "text", *attribute_columns(codes, OWN_COLUMNS), "weight")


def sample_rows(texts: int) -> tuple[int, ...]:
    """Rows whose texts the card shows: spread over the corpus, whose codes lie one after the other."""
    return tuple(sorted({number * texts // SAMPLES for number in range(SAMPLES)})) if texts else ()


def shard_names(shards: int) -> tuple[str, ...]:
    """Paths of the Parquet files, in the order of the rows."""
    return tuple(SHARDS.replace("*", f"{number:05d}-of-{shards:05d}") for number in range(shards))


def listed_files(shards: int, signed: bool) -> set[str]:
    """All files that a manifest lists: everything but itself and its signature."""
    fixed = {CARD, WORDS, STATEMENT, FACTS, CROISSANT, STUDY, JSON_LINES, *shard_names(shards)}
    return fixed | ({PUBLIC_KEY} if signed else set())


def sha256_of(file: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def manifest_text(digests: Mapping[str, str]) -> str:
    """What ``sha256sum --check`` reads."""
    return "".join(f"{digests[name]}  {name}\n" for name in sorted(digests))


def read_manifest(text: str) -> dict[str, str]:
    """Inverse of `manifest_text`; anything else is a ValueError."""
    lines = [_LINE.fullmatch(line) for line in text.removesuffix("\n").split("\n")]
    found = {line[2]: line[1] for line in lines if line}
    if manifest_text(found) != text:
        raise ValueError("not a sorted list of files as sha256sum writes it")
    return found


def found_files(folder: Path) -> tuple[set[str], list[str]]:
    """Regular files in a folder and below, and what else is there, which a bundle has no place for."""
    files, strange = set(), []
    for parent, folders, names in os.walk(folder):
        for name in [*names, *(name for name in folders if (Path(parent) / name).is_symlink())]:
            path = Path(parent, name)
            relative = path.relative_to(folder).as_posix()
            if stat.S_ISREG(path.lstat().st_mode):
                files.add(relative)
            else:
                strange.append(relative)
    return files, sorted(strange)
