"""Embedders: each text for itself, pinned files, and texts as a reader sees them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer

from common.errors import MissingExtraError, ModelError
from common.models import embedder as module
from common.models.embedder import MOST_CHARACTERS, Embedder, cleaned, is_embedder, load_embedder, manifest_of_embedder
from common.models.manifest import Manifest
from common.study import Voting
from tests.tiny_embedder import DIMENSION, make_tiny_embedder

TEXTS = [
    "The nurse on ward 4 was kind.",
    "",
    " \t\n",
    "Parking is expensive, and the machine takes no coins. " * 40,
    "ok",
    "Très bien accueilli à l'hôpital",
    "ทีมพยาบาลดีมาก",
    "x" * 50_000,
    "The nurse on ward 4 was kind.",
]


def test_a_text_has_the_same_vector_in_any_company() -> None:
    embedder = load_embedder(Voting())
    together = embedder.embed(TEXTS)
    assert together.dtype == np.float32
    for text, vector in zip(TEXTS, together, strict=True):
        np.testing.assert_array_equal(embedder.embed([text])[0], vector)
    order = np.random.default_rng(0).permutation(len(TEXTS))
    np.testing.assert_array_equal(embedder.embed([TEXTS[i] for i in order]), together[order])


def test_no_text_is_no_vector() -> None:
    assert load_embedder(Voting()).embed([]).shape == (0, 256)


def test_the_default_is_the_one_that_studies_have_pinned() -> None:
    digest = "93ccb5ab12f304b55d201997cee525da25d07dcb64a0724752897e3cf20b1638"
    assert manifest_of_embedder("wordllama").digest == digest, "another version, or other files count"


def test_every_text_has_a_vector() -> None:
    vectors = load_embedder(Voting()).embed(TEXTS)
    assert np.isfinite(vectors).all()
    assert (np.linalg.norm(vectors, axis=1) > 0).all()


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("plain words", "plain words"),
        ("two\nlines\tand\u00a0blanks  ", "two lines and blanks"),
        ("pass\u200bword \u202egnihton\u202c", "password gnihton"),
        ("e\u0301t\u00e9", "\u00e9t\u00e9"),
        ("bell\x07 and null\x00", "bell and null"),
        ("\u200b\u200c", "."),
        ("", "."),
        ("\ud800 alone", "alone"),
        ("שלום", "שלום"),
    ],
)
def test_a_text_is_read_as_it_looks(text: str, seen: str) -> None:
    assert cleaned(text) == seen
    assert cleaned(seen) == seen


def test_texts_that_look_the_same_have_the_same_vector() -> None:
    plain, hidden = load_embedder(Voting()).embed(["kind staff", "kind\u200b \u2066staff\u2069\x00"])
    np.testing.assert_array_equal(plain, hidden)


def test_a_huge_text_is_read_up_to_a_limit() -> None:
    start = "word " * (MOST_CHARACTERS // 5) + "x" * (MOST_CHARACTERS % 5)
    embedder = load_embedder(Voting())
    vectors = embedder.embed([start, start + " and more" * 1_000_000])
    np.testing.assert_array_equal(vectors[0], vectors[1])


def test_texts_that_are_embedded_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH_CHARACTERS", 100)
    texts = ["a" * n for n in (1, 90, 200, 3, 30, 30, 30, 99)]
    batches = list(module._batches(texts))
    assert sorted(i for batch in batches for i in batch) == list(range(len(texts)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(len(texts[i]) for i in batch) <= 100


def test_a_pinned_embedder_is_taken_and_another_refused() -> None:
    digest = manifest_of_embedder("wordllama").digest
    load_embedder(Voting(embedder_sha256=digest))
    with pytest.raises(ModelError, match=rf"voting\.embedder is 'wordllama': the study pins .* {digest}"):
        load_embedder(Voting(embedder_sha256="0" * 64))


def test_one_changed_byte_of_an_embedder_is_noticed(tmp_path: Path) -> None:
    source = module.EMBEDDERS["wordllama"]("").folder
    weights = next(name for name in Manifest.of(source).files if name.endswith(".safetensors"))
    assert any(name.endswith("tokenizer_config.json") for name in Manifest.of(source).files)
    copy = tmp_path / "weights.safetensors"
    content = bytearray((source / weights).read_bytes())
    copy.write_bytes(content)
    before = Manifest.of(tmp_path).digest
    content[len(content) // 2] ^= 1
    copy.write_bytes(content)
    assert Manifest.of(tmp_path).digest != before


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("word2vec", "one of ['onnx', 'sentence-transformers', 'wordllama'] is accepted"),
        ("wordllama:large", "takes no model name"),
        ("sentence-transformers", "needs a folder or hub id after a colon"),
    ],
)
def test_an_unknown_embedder_is_a_clear_error(name: str, said: str) -> None:
    with pytest.raises(ModelError, match=re.escape(said)):
        load_embedder(Voting(embedder=name))


def test_kinds_are_known_without_loading() -> None:
    assert is_embedder("wordllama")
    assert is_embedder("sentence-transformers:folder")
    assert is_embedder("onnx:folder")
    assert not is_embedder("word2vec")


# Sentence-transformers


@pytest.fixture(scope="module")
def own_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_embedder(tmp_path_factory.mktemp("tiny") / "embedder")


def _sentence_transformers(folder: Path) -> Embedder:
    return load_embedder(Voting(embedder=f"sentence-transformers:{folder}"))


def test_a_sentence_transformers_vector_is_the_same_in_any_company(own_folder: Path) -> None:
    embedder = _sentence_transformers(own_folder)
    together = embedder.embed(TEXTS)
    assert together.dtype == np.float32
    assert together.shape == (len(TEXTS), DIMENSION)
    for text, vector in zip(TEXTS, together, strict=True):
        np.testing.assert_array_equal(embedder.embed([text])[0], vector)
    order = np.random.default_rng(0).permutation(len(TEXTS))
    np.testing.assert_array_equal(embedder.embed([TEXTS[i] for i in order]), together[order])
    assert embedder.embed([]).shape == (0, DIMENSION)


def test_in_a_batch_it_would_not(own_folder: Path) -> None:
    """Twin: what running texts one at a time prevents."""
    embedder = _sentence_transformers(own_folder)
    assert isinstance(embedder, module._SentenceTransformers)
    batch = embedder._model.encode([cleaned(text) for text in TEXTS], batch_size=len(TEXTS), show_progress_bar=False)
    assert not np.array_equal(batch, embedder.embed(TEXTS))
    np.testing.assert_allclose(batch, embedder.embed(TEXTS), atol=1e-4)


def test_it_is_read_as_it_looks(own_folder: Path) -> None:
    plain, hidden = _sentence_transformers(own_folder).embed(["kind staff", "kind\u200b \u2066staff\u2069\x00"])
    np.testing.assert_array_equal(plain, hidden)


def test_a_site_keeps_it_where_it_likes(own_folder: Path) -> None:
    study = Voting(embedder="sentence-transformers:org/model")
    found = load_embedder(study, {"sentence-transformers:org/model": own_folder}).embed(TEXTS)
    np.testing.assert_array_equal(found, _sentence_transformers(own_folder).embed(TEXTS))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "1_Pooling/config.json"])
def test_one_changed_byte_of_it_is_refused(own_folder: Path, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(own_folder, tmp_path / "model"))
    pinned = manifest_of_embedder(f"sentence-transformers:{folder}").digest
    options = Voting(embedder=f"sentence-transformers:{folder}", embedder_sha256=pinned)
    load_embedder(options)
    with (folder / name).open("ab") as file:
        file.write(b"\n")
    with pytest.raises(ModelError, match=pinned):
        load_embedder(options)


def test_pickled_weights_are_refused(own_folder: Path, tmp_path: Path) -> None:
    """No digest covers them: one could be exchanged under a pin."""
    folder = Path(shutil.copytree(own_folder, tmp_path / "model"))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    _sentence_transformers(folder)
    (folder / "model.safetensors").unlink()
    assert SentenceTransformer(str(folder), device="cpu").encode(["a"]).shape == (1, DIMENSION), "twin: it takes them"
    with pytest.raises(ModelError, match=r"pytorch_model\.bin' are pickled"):
        _sentence_transformers(folder)


def test_a_folder_of_another_kind_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="can't be loaded; a sentence-transformers folder is needed"):
        _sentence_transformers(tmp_path)


def test_a_hub_that_gives_nothing_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ModelError, match="'org/model' can't be loaded; a sentence-transformers folder or hub id"):
        load_embedder(Voting(embedder="sentence-transformers:org/model"))


def test_a_missing_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"fedcorpus\[evaluation\]"):
        load_embedder(Voting(embedder="sentence-transformers:folder"))
    with pytest.raises(MissingExtraError, match="pip install fedcorpus"):
        load_embedder(Voting())
