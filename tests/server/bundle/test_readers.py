"""What people load with: every reader gives the same rows, whatever the texts and names are."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from server.bundle.files import Publication
from server.bundle.verify import verify_bundle
from server.bundle.write import write_bundle
from tests.server.bundle.finished import PRIVACY, Finished, changed_run

HOSTILE = [
    "=HYPERLINK(\"http://a.example\")", "+1", "-1", "@SUM(A1)", " padded ", "two\nlines\r\n", "tab\there", "\ufeffbom",
    "\u202eright to left", "line\u2028separator\x85next", "quote \" and ' and \\", "<script>alert(1)</script>",
    "# heading\n---\n", "| a | b |", "null", "NaN", "true", "1", "\x00nul", "\U0001f600 smile", "", "{{ jinja }} ${x}",
    "x" * 1_000_000,
]  # fmt: skip
ATTRIBUTES = [
    {"name": "id", "values": ["a"]},
    {"name": 'a: "b"\n- c|`#\u202e', "values": ["1", "x\ny: |z<b>"], "multiple": True},
]


@pytest.fixture(scope="module", autouse=True)
def _no_network_and_no_cache_of_the_users(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        patch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        yield


@pytest.fixture(scope="module")
def hostile(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of texts, names and a title that are made to do harm."""
    folder = tmp_path_factory.mktemp("hostile")
    codes = {"attributes": ATTRIBUTES}
    texts = [(text, number % 2) for number, text in enumerate(HOSTILE)]
    run = changed_run(finished, folder / "run", texts, codes=codes, privacy=PRIVACY | {"codes_per_unit": 2})
    publication = Publication(title='"}\\: # [x](y) <b> | {% x %} ---', publisher="{A} \\ B")
    write_bundle(run, folder / "bundle", publication, None, rows_per_shard=9)
    return folder / "bundle"


def _by_datasets(bundle: Path, cache: Path) -> list[list[Any]]:
    import datasets

    loaded = datasets.load_dataset(str(bundle), split="train", cache_dir=str(cache))
    return [list(row.values()) for row in loaded]


def _by_pandas(bundle: Path, _: Path) -> list[list[Any]]:
    import pandas as pd

    table: list[list[Any]] = pd.read_parquet(bundle / "data").to_numpy().tolist()
    return table


def _by_croissant(bundle: Path, _: Path) -> list[list[Any]]:
    import mlcroissant

    records = mlcroissant.Dataset(jsonld=str(bundle / "croissant.json")).records("texts")
    return [[cell.decode() if isinstance(cell, bytes) else cell for cell in row.values()] for row in records]


def _by_json_lines(bundle: Path) -> list[dict[str, Any]]:
    # Text mode, as pandas and many scripts do: it would also cut at other line ends than \n.
    with gzip.open(bundle / "data.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines.read().splitlines()]


@pytest.mark.parametrize("which", ["bundle", "hostile"])
@pytest.mark.parametrize("reader", [_by_datasets, _by_pandas, _by_croissant])
def test_every_reader_gives_the_same_rows(
    which: str, reader: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    bundle = request.getfixturevalue(which)
    expected = _by_json_lines(bundle)
    assert reader(bundle, tmp_path) == [list(row.values()) for row in expected]
    if which == "hostile":
        assert [row["text"] for row in expected] == HOSTILE
        assert list(expected[0]) == ["id", "text", "code.id", ATTRIBUTES[1]["name"], "weight"]
    else:
        assert len(expected) == 20
        assert list(expected[0]) == ["id", "text", "topic", "tone", "weight"]


def test_hostile_texts_and_names_are_no_obstacle_to_verification(hostile: Path) -> None:
    assert verify_bundle(hostile).problems == ()


def test_the_croissant_metadata_has_no_errors(bundle: Path, hostile: Path) -> None:
    import mlcroissant

    for folder in (bundle, hostile):
        dataset = mlcroissant.Dataset(jsonld=str(folder / "croissant.json"))
        assert not dataset.metadata.ctx.issues.errors
        assert dataset.metadata.name == json.loads((folder / "bundle.json").read_text())["title"]


def test_columns_have_the_types_of_the_card(bundle: Path, tmp_path: Path) -> None:
    import datasets

    features = datasets.load_dataset(str(bundle), split="train", cache_dir=str(tmp_path)).features
    assert {name: feature.dtype for name, feature in features.items()} == {
        "id": "string", "text": "string", "topic": "string", "tone": "string", "weight": "float64",
    }  # fmt: skip
