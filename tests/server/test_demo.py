"""The demo's study pins the very model that it was written with."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest

from common.errors import ModelError
from common.models.generator import Generator
from common.models.manifest import manifest_of_base
from common.study import Study
from server import demo


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "comments.csv"
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, ["text", "ward", "topic"])
        writer.writeheader()
        writer.writerows(
            {"text": f"Comment {i}.", "ward": f"ward {i % 6}", "topic": ("staff", "food")[i % 2]} for i in range(72)
        )
    return file


def test_another_model_of_that_name_is_refused(
    tiny_model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    monkeypatch.setattr(demo, "_MODEL", str(base))
    prepared = demo.prepare_demo(tmp_path / "demo", data, "ward", ("topic",), "text")
    options = Study.load(prepared.study_file).generator
    assert options.sha256 == manifest_of_base(str(base)).digest
    assert Generator(options).model is not None
    (base / "generation_config.json").write_text("{}")
    with pytest.raises(ModelError, match=options.sha256):
        Generator(options)


def test_without_the_model_nothing_is_written(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_MODEL", "package:no-such-model")
    with pytest.raises(ModelError, match="isn't installed"):
        demo.prepare_demo(tmp_path / "demo", data, "ward", ("topic",), "text")
    assert not (tmp_path / "demo").exists()
