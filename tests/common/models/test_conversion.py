"""A GGUF model is converted once; a converted one that was damaged is made anew."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import IO

import pytest
import torch

from common.errors import ModelError
from common.models import generator as module
from common.models.conversion import converted
from common.models.generator import Generator
from common.models.manifest import Manifest
from common.study import Study
from tests.hospitals import small_study
from tests.tiny_model import make_tiny_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fedcorpus" / "models"


class _Converter:
    calls = 0

    def __call__(self, gguf: Path, folder: Path) -> None:
        self.calls += 1
        for name in ("config.json", "model.safetensors"):
            (folder / name).write_text(f"{gguf.name} {name}")


def _kept(cache: Path) -> set[str]:
    return {found.name for found in cache.iterdir()} - {".lock"}


def test_it_is_made_once_for_the_same_bytes(cache: Path) -> None:
    convert = _Converter()
    first = converted(Path("a.gguf"), "1" * 64, convert)
    assert converted(Path("elsewhere/a.gguf"), "1" * 64, convert) == first
    assert convert.calls == 1
    assert converted(Path("a.gguf"), "2" * 64, convert) != first
    assert convert.calls == 2
    assert _kept(cache) == {f"gguf-{digit * 64}" for digit in "12"}, "nothing half-made"


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: (d / "model.safetensors").write_text("damaged"),
        lambda d: (d / "config.json").unlink(),
        lambda d: (d / "added_tokens.json").write_text("{}"),
        lambda d: (d / "MANIFEST.sha256").unlink(),
        lambda d: (d / "MANIFEST.sha256").write_text("?"),
        lambda d: [file.unlink() for file in d.iterdir()],
    ],
    ids=["changed", "removed", "added", "unlisted", "no list", "empty"],
)
def test_damage_is_noticed_and_made_good(damage: Callable[[Path], object], cache: Path) -> None:
    convert = _Converter()
    folder = converted(Path("a.gguf"), "1" * 64, convert)
    whole = Manifest.of(folder)
    damage(folder)
    assert converted(Path("a.gguf"), "1" * 64, convert) == folder
    assert convert.calls == 2
    assert Manifest.of(folder) == Manifest.recorded(folder) == whole
    assert _kept(cache) == {folder.name}


def test_a_conversion_that_fails_leaves_nothing(cache: Path) -> None:
    def broken(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise ModelError("no")

    with pytest.raises(ModelError):
        converted(Path("a.gguf"), "1" * 64, broken)
    assert _kept(cache) == set()


def test_two_who_want_it_at_once_make_it_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    convert, begun, waiting, flock = _Converter(), Event(), Event(), fcntl.flock

    def slow(gguf: Path, folder: Path) -> None:
        begun.set()
        # Without a lock nobody ever waits, and both make it.
        waiting.wait(timeout=5)
        convert(gguf, folder)

    def noticed(file: IO[str], operation: int) -> None:
        if begun.is_set():
            waiting.set()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", noticed)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(converted, Path("a.gguf"), "1" * 64, slow)
        begun.wait()
        second = threads.submit(converted, Path("a.gguf"), "1" * 64, slow)
        assert first.result() == second.result()
    assert convert.calls == 1
    assert not caplog.records, "nothing was damaged"


def test_a_cache_that_cannot_be_written_to_is_one_sentence(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder belongs")
    with pytest.raises(ModelError, match="the converted model can't be put there"):
        converted(Path("a.gguf"), "1" * 64, _Converter())


def test_a_gguf_folder_loads_as_the_model_it_was_made_from(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    file = make_tiny_gguf(tmp_path / "model" / "tiny.gguf")
    logits = []
    for base in (tiny("qwen2"), file.parent):
        generator = Generator(Study.model_validate(small_study(base)).generator)
        with torch.no_grad():
            logits.append(generator.model(input_ids=torch.arange(20)[None]).logits)
        assert generator.tokenizer("The staff were kind")["input_ids"] == [274, 396, 356, 394]
    assert torch.equal(logits[0], logits[1])
    monkeypatch.setattr(module, "_convert", None)
    assert Generator(Study.model_validate(small_study(file.parent)).generator).model is not None, "it is there now"


def test_a_file_that_is_no_gguf_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a.gguf").write_text("nonsense")
    with pytest.raises(ModelError, match=r"a\.gguf' can't be read as a GGUF model"):
        Generator(Study.model_validate(small_study(tmp_path / "model")).generator)
