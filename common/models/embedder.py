"""Sentence embedders, chosen by the study. The default runs on numpy alone, so a weak site needs no torch.

A new embedder is one function and one entry in `EMBEDDERS`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.errors import MissingExtraError, ModelError

Embeddings = NDArray[np.float32]


class Embedder(Protocol):
    """Turns texts into vectors."""

    def embed(self, texts: Sequence[str]) -> Embeddings:
        """Unit vectors, float32 of shape ``(texts, dimension)``; private where the texts are.

        A text's vector may depend on that text alone, to the last bit: else one unit could move another's votes.
        """


def load_embedder(name: str, local: Mapping[str, Path] | None = None) -> Embedder:
    """Load the embedder that a study names.

    Parameters
    ----------
    name
        ``KIND`` or ``KIND:MODEL``.
    local
        Where models lie on this machine, from ``site.toml``: name in the study -> folder.

    Raises
    ------
    ModelError, MissingExtraError
    """
    kind, _, model = name.partition(":")
    if kind not in EMBEDDERS:
        raise ModelError(f"voting.embedder is {name!r}; one of {sorted(EMBEDDERS)} is accepted")
    return EMBEDDERS[kind](str((local or {}).get(name, model)))


class _Wordllama:
    """Static token embeddings, mean-pooled (256 dimensions)."""

    def __init__(self) -> None:
        import wordllama

        folder = Path(str(wordllama.__file__)).parent
        # Its own package folder is the cache: the weights come with the wheel and nothing is downloaded.
        self._model = wordllama.WordLlama.load(cache_dir=folder, disable_download=True)

    def embed(self, texts: Sequence[str]) -> Embeddings:
        return _normalised(np.asarray(self._model.embed(_visible(texts), norm=True), dtype=np.float32))


class _SentenceTransformers:
    """Any sentence-transformers model (the paper's choice)."""

    def __init__(self, model: str) -> None:
        from sentence_transformers import SentenceTransformer

        try:
            self._model = SentenceTransformer(model, device="cpu")
        except (OSError, ValueError) as cause:
            raise ModelError(
                f"voting.embedder: {model!r} can't be loaded; a sentence-transformers folder or hub id is accepted"
            ) from cause

    def embed(self, texts: Sequence[str]) -> Embeddings:
        encoded = self._model.encode(
            # In a batch, padding would let a text's vector depend on the others' lengths in its last bits.
            _visible(texts),
            batch_size=1,
            normalize_embeddings=True,
            show_progress_bar=False,
        )
        return _normalised(np.asarray(encoded, dtype=np.float32))


def _wordllama(model: str) -> Embedder:
    if model:
        raise ModelError(f"voting.embedder 'wordllama' takes no model name, but {model!r} follows it")
    return _Wordllama()


def _sentence_transformers(model: str) -> Embedder:
    if not model:
        raise ModelError("voting.embedder 'sentence-transformers' needs a folder or hub id after a colon")
    if importlib.util.find_spec("sentence_transformers") is None:
        raise MissingExtraError(
            "voting.embedder asks for sentence-transformers, which isn't installed; pip install 'fedcorpus[evaluation]'"
        )
    return _SentenceTransformers(model)


EMBEDDERS: dict[str, Callable[[str], Embedder]] = {
    "wordllama": _wordllama,
    "sentence-transformers": _sentence_transformers,
}


def _visible(texts: Sequence[str]) -> list[str]:
    # An empty text has no token to pool over; a blank keeps its row.
    return [text if text.strip() else "." for text in texts]


def _normalised(vectors: Embeddings) -> Embeddings:
    """Unit rows; a row that isn't finite becomes zero, nearest to nothing in particular."""
    clean = np.nan_to_num(vectors, nan=0.0, posinf=0.0, neginf=0.0)
    norms = np.linalg.norm(clean, axis=1, keepdims=True)
    return np.asarray(clean / np.maximum(norms, 1e-12), dtype=np.float32)
