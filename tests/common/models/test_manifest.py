"""A model's files have one digest; a byte that changes, comes or goes is refused before a weight is loaded."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import ModelError
from common.models import generator as module
from common.models import location
from common.models.generator import Generator
from common.models.manifest import RECORDED, Manifest, manifest_of_base
from common.study import Study
from tests.hospitals import small_study
from tests.tiny_model import make_tiny_gguf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    (made / "parts").mkdir(parents=True)
    for name, text in (("config.json", "{}"), ("model.safetensors", "weights"), ("parts/merges.txt", "a b")):
        (made / name).write_text(text)
    return made


@pytest.fixture
def copied(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def _load(base: Path, **options: Any) -> Generator:
    return Generator(Study.model_validate(small_study(base, generator=options)).generator)


# What it is


def test_it_is_what_sha256sum_reads(folder: Path) -> None:
    manifest = Manifest.of(folder)
    assert list(manifest.files) == ["config.json", "model.safetensors", "parts/merges.txt"]
    assert manifest.files["config.json"] == hashlib.sha256(b"{}").hexdigest()
    (folder / RECORDED).write_text(manifest.text)
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", RECORDED], cwd=folder, check=True)
    assert hashlib.sha256((folder / RECORDED).read_bytes()).hexdigest() == manifest.digest
    assert Manifest.recorded(folder) == manifest


def test_what_loading_never_reads_does_not_count(folder: Path) -> None:
    before = Manifest.of(folder).digest
    (folder / ".cache").mkdir()
    for name in ("README.md", "pytorch_model.bin", ".cache/state.json", ".hidden.json", RECORDED):
        (folder / name).write_text("another")
    assert Manifest.of(folder).digest == before


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "spiece.model", "source.spm", "parts/model-2.safetensors", "a.gguf"]
)
def test_a_file_that_comes_counts(folder: Path, name: str) -> None:
    before = Manifest.of(folder)
    (folder / name).write_text("another")
    assert Manifest.of(folder).digest != before.digest
    assert Manifest.of(folder).difference(before) == f"{name!r} was added"


def test_it_does_not_depend_on_the_order_or_the_place(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    for name in ("parts/merges.txt", "model.safetensors", "config.json"):
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / name, other / name)
    assert Manifest.of(other) == Manifest.of(folder)


def test_links_to_files_are_read_and_links_to_folders_are_not_followed(folder: Path, tmp_path: Path) -> None:
    """As in a hub's cache, which is made of links to files."""
    cached = tmp_path / "cached"
    (cached / "parts").mkdir(parents=True)
    for name in Manifest.of(folder).files:
        (cached / name).symlink_to(folder / name)
    assert Manifest.of(cached) == Manifest.of(folder)
    (cached / "elsewhere").symlink_to(folder)
    (cached / "around").symlink_to(cached)
    assert Manifest.of(cached) == Manifest.of(folder)
    (folder / "config.json").write_text('{"changed": 1}')
    assert Manifest.of(cached) == Manifest.of(folder)


@pytest.mark.parametrize("problem", ["nothing", "dangling", "newline"])
def test_what_cannot_be_listed_is_one_sentence(tmp_path: Path, problem: str) -> None:
    if problem == "dangling":
        (tmp_path / "config.json").symlink_to(tmp_path / "gone")
    elif problem == "newline":
        (tmp_path / "a\nb.json").write_text("{}")
    expected = {"nothing": "no model files", "dangling": "can't be read", "newline": "no name for a file"}[problem]
    with pytest.raises(ModelError, match=expected) as caught:
        Manifest.of(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["not a manifest\n", "ab  config.json\n", "\ufffd"])
def test_a_list_in_another_form_is_none(folder: Path, text: str) -> None:
    (folder / RECORDED).write_text(text)
    assert Manifest.recorded(folder) is None


# What a base's is


def test_that_of_a_folder_and_of_a_sites_own_place(folder: Path, tmp_path: Path) -> None:
    assert manifest_of_base(str(folder)) == Manifest.of(folder)
    assert manifest_of_base("org/model", {"org/model": folder}) == Manifest.of(folder)
    with pytest.raises(ModelError, match="no such folder"):
        manifest_of_base(str(tmp_path / "gone"))


def test_that_of_a_package_is_of_its_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "some_model"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "other.json").write_text("{}")
    (package / "m.gguf").write_text("weights")
    monkeypatch.syspath_prepend(tmp_path)
    assert manifest_of_base("package:some-model").lines == [f"{hashlib.sha256(b'weights').hexdigest()}  m.gguf"]


def test_that_of_a_hub_id_is_of_what_is_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(base: str, allow_patterns: list[str]) -> str:
        asked.append((base, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert manifest_of_base("org/model") == Manifest.of(folder)
    ((base, patterns),) = asked
    assert base == "org/model"
    assert not any(pattern in patterns for pattern in ("*", "*.bin", "*.pt", "*.py"))


@pytest.mark.parametrize("error", [OSError("no network"), ValueError("no such name"), ImportError("no library")])
def test_a_hub_that_gives_nothing_is_one_sentence(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ModelError, match=r"'org/model': no such folder here.*hub"):
        manifest_of_base("org/model")


# What a study pins


def test_the_pinned_model_is_loaded(copied: Path) -> None:
    assert _load(copied, sha256=Manifest.of(copied).digest).model is not None


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: _flip(d / "model.safetensors"), "'model.safetensors' has another content"),
        (lambda d: _flip(d / "tokenizer.json"), "'tokenizer.json' has another content"),
        (lambda d: (d / "added_tokens.json").write_text("{}"), "'added_tokens.json' was added"),
        (lambda d: (d / "generation_config.json").unlink(), "'generation_config.json' is missing"),
    ],
    ids=["weights", "tokenizer", "added", "removed"],
)
def test_a_changed_byte_is_refused_before_anything_is_loaded(
    copied: Path, change: Callable[[Path], object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = Manifest.of(copied)
    change(copied)

    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("a changed model was loaded")

    with monkeypatch.context() as patch:
        patch.setattr(module.AutoConfig, "from_pretrained", loaded)
        with pytest.raises(ModelError) as caught:
            _load(copied, sha256=pinned.digest)
        assert pinned.digest in str(caught.value)
        assert Manifest.of(copied).digest in str(caught.value)
        assert said not in str(caught.value), "without a list of its own the folder can't say which"
        (copied / RECORDED).write_text(pinned.text)
        with pytest.raises(ModelError, match=said):
            _load(copied, sha256=pinned.digest)


def test_what_the_study_does_not_pin_is_loaded_unread(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twin: it is the pin that refuses, and what isn't pinned costs nothing."""
    _flip(copied / "model.safetensors")
    monkeypatch.setattr(Manifest, "of", None)
    assert _load(copied).model is not None


def test_each_file_is_read_once_for_the_pin(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest, hashed, inner = Manifest.of(copied).digest, [], hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, name: hashed.append(file.name) or inner(file, name))
    _load(copied, sha256=digest)
    assert len(hashed) == len(set(hashed)) == len(Manifest.of(copied).files)


def test_a_pinned_gguf_model_is_that_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    file = make_tiny_gguf(tmp_path / "model" / "tiny.gguf")
    digest = manifest_of_base(str(file.parent)).digest
    assert digest == Manifest.of(file).digest
    _load(file.parent, sha256=digest)
    _flip(file)
    with pytest.raises(ModelError, match=digest):
        _load(file.parent, sha256=digest)


def test_hub_names_of_pickles_are_never_asked_for() -> None:
    assert not {f"*{ending}" for ending in (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".py")} & set(location._FROM_HUB)
