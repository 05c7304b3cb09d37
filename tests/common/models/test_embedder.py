"""Embedders: each text for itself, pinned files, and texts as a reader sees them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from common.errors import ModelError
from common.models import embedder as module
from common.models.embedder import MOST_CHARACTERS, cleaned, is_embedder, load_embedder, manifest_of_embedder
from common.models.manifest import Manifest
from common.study import Voting

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
    source = module.EMBEDDERS["wordllama"].source("")
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
        ("word2vec", "one of ['sentence-transformers', 'wordllama'] is accepted"),
        ("wordllama:large", "takes no model name"),
    ],
)
def test_an_unknown_embedder_is_a_clear_error(name: str, said: str) -> None:
    with pytest.raises(ModelError, match=re.escape(said)):
        load_embedder(Voting(embedder=name))


def test_kinds_are_known_without_loading() -> None:
    assert is_embedder("wordllama")
    assert is_embedder("sentence-transformers:folder")
    assert not is_embedder("word2vec")
