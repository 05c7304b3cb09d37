"""Croissant metadata (``croissant.json``, format 1.1): what the files are and how rows are read from them.

The vocabulary is the standard's own context, which readers compare by its keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from server.bundle import files
from server.bundle.card import citation
from server.bundle.files import Facts
from server.report import at_most
from server.statement import PrivacyStatement

RECORDS = "texts"
"""Id of the record set."""

_CR = (
    "annotation", "arrayShape", "citeAs", "column", "containedIn", "equivalentProperty", "extract", "field",
    "fileObject", "fileProperty", "fileSet", "format", "includes", "isArray", "isLiveDataset", "jsonPath", "key", "md5",
    "parentField", "path", "recordSet", "references", "regex", "repeated", "replace", "samplingRate", "separator",
    "source", "subField", "transform",
)  # fmt: skip

_CONTEXT: Mapping[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    **{name: f"cr:{name}" for name in _CR},
    "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "description": {"@container": "@language"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "name": {"@container": "@language"},
    "rai": "http://mlcommons.org/croissant/RAI/",
    "sc": "https://schema.org/",
}

_NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def croissant(facts: Facts, statement: PrivacyStatement, digests: Mapping[str, str]) -> str:
    """The metadata as a file.

    Parameters
    ----------
    digests
        SHA-256 of every data file by its path in the bundle.
    """
    shards = files.shard_names(facts.shards)
    metadata = {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.1",
        "name": facts.title,
        "description": _description(facts, statement),
        "version": "1.0.0",
        "datePublished": facts.date,
        "citeAs": citation(facts, statement),
        **({} if facts.license == "unknown" else {"license": facts.license}),
        **({"inLanguage": facts.language} if facts.language else {}),
        **({"creator": {"@type": "sc:Organization", "name": facts.publisher}} if facts.publisher else {}),
        "keywords": ["synthetic", "differential privacy", "fedcorpus"],
        "rai:personalSensitiveInformation": _privacy(statement),
        "rai:dataLimitations": list(statement.not_covered),
        "distribution": [
            *(_file(name, digests[name], "application/x-parquet") for name in shards),
            _file(files.JSON_LINES, digests[files.JSON_LINES], "application/gzip"),
            {
                "@type": "cr:FileSet",
                "@id": "parquet",
                "name": "parquet",
                "description": "All Parquet files, in the order of the rows.",
                "encodingFormat": "application/x-parquet",
                "includes": files.SHARDS,
            },
        ],
        "recordSet": [
            {
                "@type": "cr:RecordSet",
                "@id": RECORDS,
                "name": RECORDS,
                "description": "One record for each synthetic text.",
                "key": {"@id": f"{RECORDS}/id"},
                "field": [_field(column, number) for number, column in enumerate(facts.columns)],
            }
        ],
    }
    return json.dumps(metadata, indent=1, ensure_ascii=True) + "\n"


def field_id(column: str, number: int) -> str:
    """Id of a column's field. Ids can't have blanks: a column whose name isn't plain goes by its number."""
    return f"{RECORDS}/{column if _NAMES.fullmatch(column) else f'column-{number}'}"


def _file(name: str, digest: str, encoding: str) -> dict[str, Any]:
    return {
        "@type": "cr:FileObject",
        "@id": name,
        "name": name.rpartition("/")[2],
        "contentUrl": name,
        "encodingFormat": encoding,
        "sha256": digest,
    }


def _field(column: str, number: int) -> dict[str, Any]:
    return {
        "@type": "cr:Field",
        "@id": field_id(column, number),
        "name": column,
        "description": _MEANS.get(column, "A control code's attribute."),
        "dataType": "cr:Float64" if column == "weight" else "sc:Text",
        "source": {"fileSet": {"@id": "parquet"}, "extract": {"column": column}},
    }


_MEANS = {
    "id": "Place of the text in the corpus.",
    "text": "The synthetic text.",
    "weight": "What the text counts for; adds up to the number of texts.",
}


def _description(facts: Facts, statement: PrivacyStatement) -> str:
    return f"{facts.texts} synthetic texts with control codes. {_privacy(statement)}"


def _privacy(statement: PrivacyStatement) -> str:
    return (
        f"Made from documents of several sites under differential privacy: epsilon {at_most(statement.epsilon)}, delta "
        f"{statement.delta:g}, for adding or removing one {statement.unit} ({statement.unit_means}). "
        f"{files.STATEMENT} says the rest."
    )
