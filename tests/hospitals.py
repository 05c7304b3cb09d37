"""Hospitals for tests: real text where it is there, the demo's packaged reviews in a stranger's clone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from common.study import Study

NHS_FEEDBACK = Path(__file__).parents[2] / "shared" / "data" / "nhs_feedback_9class.jsonl.gz"
"""Real comments of patients of three hospitals; present beside a developer's checkout only."""


def small_study(base: Path, **changes: Mapping[str, Any]) -> dict[str, Any]:
    """A study that the tiny model finishes in seconds, as a dictionary to edit."""
    study: dict[str, Any] = {
        "name": "small",
        "codes": {
            "preamble": "A comment.",
            "attributes": [{"name": "topic", "values": ["staff", "parking"]}, {"name": "tone", "values": [1, 2]}],
        },
        "privacy": {"epsilon": 8.0, "delta": 1e-4},
        "generator": {"base": str(base), "rank": 2, "max_tokens": 48},
        "training": {"rounds": 2, "steps": 2, "batch_size": 8},
        "pool": {"size": 24, "max_new_tokens": 8, "batch_size": 8},
        "corpus": {"size": 20},
        "federation": {
            "expected_sites": 4, "min_strong": 1, "min_weak": 1, "min_documents": 20,
            "census_seconds": 5, "round_seconds": 120, "vote_seconds": 60,
        },
    }  # fmt: skip
    for section, values in changes.items():
        study[section] = {**study[section], **values}
    return study


def rows(count: int, offset: int = 0) -> list[dict[str, Any]]:
    """Made-up documents that fit `small_study`."""
    return [
        {
            "text": f"Comment number {offset + i} about {'the staff' if i % 3 else 'parking'}, take {i % 7}.",
            "topic": "staff" if i % 3 else "parking",
            "tone": 1 + i % 2,
            "patient": f"p{(offset + i) // 2}",
        }
        for i in range(count)
    ]


def write_study(folder: Path, study: Mapping[str, Any]) -> Path:
    """Write ``study.toml`` by way of the model, so that a test's study is a valid one."""
    file = folder / "study.toml"
    Study.model_validate(study)
    file.write_text(_toml(study), encoding="utf-8")
    return file


def write_site(
    folder: Path, name: str, tier: str, documents: Sequence[Mapping[str, Any]], extra: str = "", **top: Any
) -> Path:
    """Write a hospital's documents and its ``site.toml``; returns the site file."""
    home = folder / "hospitals" / name
    home.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist([dict(row) for row in documents]), home / "documents.parquet")
    values = {"name": name, "tier": tier, "size_class": 20, "state": str(home / "state")} | top
    sites = folder / "sites"
    sites.mkdir(exist_ok=True)
    file = sites / f"{name}.toml"
    file.write_text(
        "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
        + f'[documents]\npath = {json.dumps(str(home / "documents.parquet"))}\npatient_column = "patient"\n'
        + f"[policy]\nmax_epsilon = 20.0\nmax_delta = 1e-3\n{extra}",
        encoding="utf-8",
    )
    return file


def _toml(value: Mapping[str, Any], prefix: str = "") -> str:
    """Just enough TOML for studies: scalars, lists of scalars, tables, and arrays of tables."""
    scalars, tables = [], []
    for key, item in value.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(item, Mapping):
            tables.append(f"\n[{path}]\n{_toml(item, path)}")
        elif isinstance(item, list) and item and isinstance(item[0], Mapping):
            tables += [f"\n[[{path}]]\n{_toml(element, path)}" for element in item]
        else:
            scalars.append(f"{key} = {json.dumps(item)}\n")
    return "".join([*scalars, *tables])
