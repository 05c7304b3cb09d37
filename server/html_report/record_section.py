"""The last section: settings, versions, hashes, what was dropped, how long it took."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from common.configuration import options_of
from common.study import Study
from server.html_report.material import Material
from server.html_report.view import Block, Column, Section, Table, Words
from server.html_report.visible import shortened
from server.html_report.words import count, size
from server.progress import PHASES
from server.summary import phases

_MADE_WITH = ("jinja2", "matplotlib", "numpy", "pydantic", "scipy", "pyarrow", "opendp")
_LONGEST_VALUE = 200


def record(material: Material) -> Section:
    """Everything needed to say which run this is, and to make it again."""
    summary = material.summary
    blocks: list[Block] = [Words(f"Run {summary.run_id}; {phases(summary.seconds, PHASES) or 'no phase was timed'}.")]
    blocks.append(_hashes(material))
    blocks.append(
        Table(
            caption="Generated texts that weren't kept, by reason",
            columns=(Column("reason"), Column("texts", True)),
            rows=[(reason, count(number)) for reason, number in summary.dropped.items()] or [("none", "0")],
            folded=False,
        )
    )
    blocks.append(_versions(material))
    blocks.append(
        Table(
            caption="Every option of the study",
            columns=(Column("option"), Column("value"), Column("what it means")),
            rows=list(_options(material.study)),
        )
    )
    return Section("record", "Settings, versions, hashes", "Record", "", blocks)


def sha256(path: Path) -> str:
    """SHA-256 of a file, read in parts."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hashes(material: Material) -> Table:
    space = material.workspace
    files = [
        ("study", space.study), ("adapter", space.adapter / "adapter_model.safetensors"),
        ("candidate pool", space.pool), ("noisy profiles", space.profiles), ("noisy ballots", space.ballots),
        ("corpus", space.corpus_parquet), ("corpus as JSON lines", space.corpus_jsonl), ("summary", space.summary_json),
    ]  # fmt: skip
    rows = [(what, path.name, size(path.stat().st_size), sha256(path)) for what, path in files if path.is_file()]
    pins = [("language model", material.study.generator.base, material.study.generator.sha256)]
    pins.append(("embedder", material.study.voting.embedder, material.study.voting.embedder_sha256))
    rows += [(what, name, "–", pin or "not pinned by the study") for what, name, pin in pins]
    return Table(
        caption="Hashes (SHA-256)",
        columns=(Column("what"), Column("name"), Column("size", True), Column("SHA-256")),
        rows=rows,
        folded=False,
    )


def _versions(material: Material) -> Table:
    run = dict(material.summary.software)
    here = {name: metadata.version(name) for name in _MADE_WITH if name not in run}
    return Table(
        caption="Versions",
        columns=(Column("package"), Column("version"), Column("where")),
        rows=[
            *((name, version, "at the coordinator, in the run") for name, version in run.items()),
            *((name, version, "where this report was made") for name, version in here.items()),
        ],
    )


def _options(study: Study) -> Iterator[tuple[str, str, str]]:
    """Dotted name, value and meaning of every option, in the order of the study's file."""
    values = study.model_dump(mode="json")
    for name, default, description in options_of(Study):
        found = _value(values, name.split("."))
        said = json.dumps(found, ensure_ascii=False)
        changed = "" if default in (said, "required") else f" (default {shortened(default, 40)})"
        yield name, f"{shortened(said, _LONGEST_VALUE)}{changed}", description


def _value(values: object, path: list[str]) -> object:
    for step in path:
        if isinstance(values, list):
            values = [item.get(step) for item in values]
        elif isinstance(values, dict):
            values = values.get(step)
    return values
