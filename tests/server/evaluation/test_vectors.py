"""Vectors are the embedder's own, of length 1, and made once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from common.errors import UserError
from common.models.embedder import load_embedder
from common.study import Voting
from server.evaluation import vectors
from server.evaluation.vectors import Vectors

TEXTS = ["one kind nurse", "no parking", "one kind nurse", "a longer text about nothing in particular"]


def test_they_are_the_embedders_own_made_to_length_1() -> None:
    own = load_embedder(Voting()).embed(TEXTS)
    found = Vectors("wordllama")(TEXTS)
    np.testing.assert_allclose(found, own / np.linalg.norm(own, axis=1, keepdims=True), rtol=1e-5)
    assert found.dtype == np.float32
    assert Vectors("wordllama")([]).shape == (0, own.shape[1])


def test_what_is_kept_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Vectors("wordllama", tmp_path / "cache")(TEXTS)

    def none(options: Voting) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(vectors, "load_embedder", none)
    np.testing.assert_array_equal(Vectors("wordllama", tmp_path / "cache")(TEXTS), made)
    with pytest.raises(AssertionError, match="a model was loaded"):
        Vectors("wordllama", tmp_path / "cache")(["another text"])


def test_another_embedder_has_vectors_of_its_own(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.tiny_embedder import DIMENSION, make_tiny_embedder

    folder = make_tiny_embedder(tmp_path_factory.mktemp("embedder"))
    Vectors("wordllama", tmp_path)(TEXTS)
    assert Vectors(f"sentence-transformers:{folder}", tmp_path)(TEXTS).shape == (4, DIMENSION)
    assert len(list(tmp_path.glob("vectors-*.sqlite"))) == 2


def test_each_text_is_embedded_once_and_progress_ends_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Counting:
        def embed(self, texts: Sequence[str]) -> np.ndarray:
            asked.extend(texts)
            return np.ones((len(texts), 2), dtype=np.float32)

    monkeypatch.setattr(vectors, "load_embedder", lambda options: Counting())
    told: list[tuple[int, int]] = []
    Vectors("wordllama")(TEXTS, lambda done, total: told.append((done, total)))
    assert asked == sorted(set(TEXTS), key=len)
    assert told[-1] == (3, 3)


def test_a_cache_that_is_no_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--cache .*file: can't be used"):
        Vectors("wordllama", tmp_path / "file")
