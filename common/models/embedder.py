"""Sentence embedders, chosen by the study. The default runs on numpy alone, so a weak site needs no torch.

A text's vector may depend on that text alone, to the last bit: else one unit could move another's votes. So a batch is
allowed only where an embedder's arithmetic keeps a text's vector as it is alone; a test holds it for each.

A new embedder is one class and one entry in `EMBEDDERS`, which says how it is found.
"""

from __future__ import annotations

import importlib.util
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from common.errors import MissingExtraError, ModelError
from common.models.manifest import Manifest, check_pinned
from common.models.onnx_embedder import OnnxEmbedder, OnnxFiles
from common.study import Voting

Embeddings = NDArray[np.float32]

MOST_CHARACTERS = 16_384
"""Of a text that are read; what comes after has no part in its vector. Bounds the memory that one text takes."""

_BATCH_CHARACTERS = 1 << 15
"""With padding, of the texts that are embedded together: a character is a few tokens at most, and a token 1 KB."""


class Embedder(Protocol):
    """Turns texts into vectors."""

    def embed(self, texts: Sequence[str]) -> Embeddings:
        """Vectors of any length, float32 of shape ``(texts, dimension)``; private where the texts are.

        A text's vector depends on that text alone, to the last bit.
        """


@dataclass(frozen=True)
class Source:
    """An embedder's files on this machine, found but not loaded.

    Attributes
    ----------
    folder
        Where they are.
    load
        Makes the embedder. Raises ModelError.
    names
        Those that count, relative to the folder; unset means all that define a model.
    """

    folder: Path
    load: Callable[[], Embedder]
    names: Sequence[str] | None = None

    def manifest(self) -> Manifest:
        """What a study pins. Raises ModelError."""
        return Manifest.of(self.folder, self.names)


def load_embedder(options: Voting, local: Mapping[str, Path] | None = None) -> Embedder:
    """Load the embedder that a study names.

    Parameters
    ----------
    options
        ``voting.embedder`` is ``KIND`` or ``KIND:MODEL``; ``voting.embedder_sha256`` pins its files.
    local
        Where models lie on this machine, from ``site.toml``: name in the study -> folder.

    Raises
    ------
    ModelError
        If there is no such embedder, or its files aren't those that the study pins.
    MissingExtraError
        If its library isn't installed.
    """
    name, pinned = options.embedder, options.embedder_sha256
    source = _found(name, local)
    if pinned is not None:
        check_pinned("voting.embedder", name, source.folder, source.manifest(), pinned)
    return source.load()


def manifest_of_embedder(name: str, local: Mapping[str, Path] | None = None) -> Manifest:
    """The files of ``voting.embedder``, whose digest a study pins. Raises as `load_embedder` does."""
    return _found(name, local).manifest()


def is_embedder(name: str) -> bool:
    """Whether ``name`` is of a known kind; nothing is loaded."""
    return name.partition(":")[0] in EMBEDDERS


def cleaned(text: str) -> str:
    """A text as embedders read it: as it looks (see `visible`), and not too long.

    Two texts that look the same to a reader then have the same vector, and a candidate gets no vote for characters that
    aren't shown. A text with nothing to see is a full stop: an empty one would have no vector.
    """
    return visible(text[:MOST_CHARACTERS]) or "."


def visible(text: str) -> str:
    """A text as it looks: NFC, one blank for any white space, nothing that can't be seen."""
    text = unicodedata.normalize("NFC", text)
    if not text.isprintable():
        # White space first: a line break isn't printable either, but separates words.
        text = "".join(c if c.isprintable() else " " if c.isspace() else "" for c in text)
    return " ".join(text.split())


class _Wordllama:
    """Static token embeddings, mean-pooled (256 dimensions)."""

    worth_caching = False
    """Thousands of documents a second: it isn't worth keeping private vectors on a disk (see
    `client_weak.embedding_cache`, which keeps those of every embedder that doesn't say so)."""

    def __init__(self, source: Path) -> None:
        import wordllama

        # Its own package folder is the cache: the weights come with the wheel and nothing is downloaded.
        self._model = wordllama.WordLlama.load(cache_dir=source, disable_download=True)

    @classmethod
    def find(cls, model: str) -> Source:
        if model:
            raise ModelError(f"voting.embedder 'wordllama' takes no model name, but {model!r} follows it")
        module = importlib.util.find_spec("wordllama")
        if module is None or module.origin is None:
            raise MissingExtraError("voting.embedder is 'wordllama', which isn't installed; pip install fedcorpus")
        folder = Path(module.origin).parent
        return Source(folder, lambda: cls(folder))

    def embed(self, texts: Sequence[str]) -> Embeddings:
        # A token's vector is added to the sum of those before it, and padding adds zeros at the end: a text's sum is
        # the same in any batch.
        vectors = np.zeros((len(texts), self._model.embedding.shape[1]), dtype=np.float32)
        readable = [cleaned(text) for text in texts]
        for batch in _batches(readable):
            found = self._model.embed([readable[i] for i in batch], norm=False, batch_size=len(batch))
            vectors[batch] = found
        return _finite(vectors)


class _SentenceTransformers:
    """Any sentence-transformers model (the paper's choice)."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @classmethod
    def find(cls, model: str) -> Source:
        if not model:
            raise ModelError("voting.embedder 'sentence-transformers' needs a folder or hub id after a colon")
        if importlib.util.find_spec("sentence_transformers") is None:
            raise MissingExtraError(
                "voting.embedder asks for sentence-transformers, which isn't installed; "
                "pip install 'fedcorpus[evaluation]'"
            )
        folder = Path(model) if Path(model).is_dir() else _downloaded(model)
        return Source(folder, lambda: cls._load(folder))

    @classmethod
    def _load(cls, folder: Path) -> Embedder:
        from sentence_transformers import SentenceTransformer

        for pickled in sorted(folder.rglob("pytorch_model*.bin")):
            if not any(pickled.parent.glob("*.safetensors")):
                raise ModelError(
                    f"voting.embedder: the weights {str(pickled)!r} are pickled, which no digest covers; safetensors "
                    "are needed"
                )
        try:
            return cls(SentenceTransformer(str(folder), device="cpu", local_files_only=True))
        except (OSError, ValueError) as cause:
            raise ModelError(
                f"voting.embedder: {str(folder)!r} can't be loaded; a sentence-transformers folder is needed"
            ) from cause

    def embed(self, texts: Sequence[str]) -> Embeddings:
        if not texts:
            # Of the right length: versions differ in how they say it.
            return self.embed(["."])[:0]
        encoded = self._model.encode(
            # In a batch, padding would let a text's vector depend on the others' lengths in its last bits.
            [cleaned(text) for text in texts],
            batch_size=1,
            show_progress_bar=False,
        )
        return _finite(np.asarray(encoded, dtype=np.float32))

    def embed_batched(self, texts: Sequence[str]) -> Embeddings:
        """As `embed`, twice as fast and not to the last bit: never for votes."""
        if not texts:
            return self.embed(texts)
        encoded = self._model.encode([cleaned(text) for text in texts], batch_size=16, show_progress_bar=False)
        return _finite(np.asarray(encoded, dtype=np.float32))


class _Onnx:
    """A sentence-transformers model as an ONNX graph, without torch."""

    def __init__(self, files: OnnxFiles) -> None:
        self._model = OnnxEmbedder(files)

    @classmethod
    def find(cls, model: str) -> Source:
        files = OnnxFiles.find(model)
        return Source(files.folder, lambda: cls(files), files.names)

    def embed(self, texts: Sequence[str]) -> Embeddings:
        return _finite(self._model.embed([cleaned(text) for text in texts]))


EMBEDDERS: dict[str, Callable[[str], Source]] = {
    "wordllama": _Wordllama.find,
    "sentence-transformers": _SentenceTransformers.find,
    "onnx": _Onnx.find,
}
"""Kind -> finds the embedder of that kind that has this name. Raises ModelError, MissingExtraError."""


def _found(name: str, local: Mapping[str, Path] | None) -> Source:
    kind, _, model = name.partition(":")
    if kind not in EMBEDDERS:
        raise ModelError(f"voting.embedder is {name!r}; one of {sorted(EMBEDDERS)} is accepted")
    return EMBEDDERS[kind](str((local or {}).get(name, model)))


def _downloaded(model: str) -> Path:
    """The files of a hub id. What was downloaded before is found without a network."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model"]))
    except (OSError, ValueError) as cause:
        raise ModelError(
            f"voting.embedder: {model!r} can't be loaded; a sentence-transformers folder or hub id is accepted"
        ) from cause


def _batches(texts: Sequence[str]) -> Iterator[list[int]]:
    """Indices of texts of about one length, so that padding and memory stay small."""
    batch: list[int] = []
    for index in sorted(range(len(texts)), key=lambda i: len(texts[i])):
        if batch and len(texts[index]) * (len(batch) + 1) > _BATCH_CHARACTERS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _finite(vectors: Embeddings) -> Embeddings:
    """The vectors; one that isn't finite becomes zero, near to nothing in particular."""
    return np.where(np.isfinite(vectors).all(axis=1, keepdims=True), vectors, np.float32(0))
