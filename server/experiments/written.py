"""Texts that a generator wrote beside its pool, kept for every cell that asks the same generator for more.

Cells over selection rules, votes or epsilons want nearly the same fresh texts of the same adapter. What one cell had
written, the next one takes, and only what is missing is written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.protocol import CandidatePool
from common.study import Study
from server.experiments.cache import Earlier
from server.experiments.pooling import loaded
from server.experiments.situation import TUNED
from server.generation import OnText, SyntheticText, TextSampler
from server.workspace import write_atomically

_SPARE = 0.2
"""So much more is written than is missing: the next cell's noise asks for a few more."""


class KeptTexts:
    """A sampler that takes what is on disk first, and loads the generator only for what isn't.

    Parameters
    ----------
    folder
        Where texts are kept.
    made_by
        Everything that the texts hang on; hashed, it names the file.
    pool
        No text is one of it.
    """

    def __init__(
        self, folder: Path, made_by: Mapping[str, Any], study: Study, pool: CandidatePool, earlier: Earlier
    ) -> None:
        self._folder, self._made_by = folder, made_by
        self._study, self._pool, self._earlier = study, pool, earlier
        self._given: list[SyntheticText] = []

    def sample(
        self, wanted: NDArray[np.int64], on_text: OnText = lambda _made, _wanted: None, *, series: str
    ) -> list[SyntheticText]:
        """As `TextSampler.sample`."""
        if not wanted.sum():
            return []
        file = self._folder / f"{self._key(series)}.jsonl"
        kept = _read(file)
        if (missing := np.maximum(wanted - _counts(kept, wanted.size), 0)).sum():
            kept += self._written(missing, kept, on_text, series)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, "".join(json.dumps([text.code, text.text]) + "\n" for text in kept).encode())
        chosen = [text for code in range(wanted.size) for text in _of(kept, code)[: wanted[code]]]
        self._given += chosen
        return chosen

    def _written(
        self, missing: NDArray[np.int64], kept: list[SyntheticText], on_text: OnText, series: str
    ) -> list[SyntheticText]:
        sampler = TextSampler(loaded(self._study, self._earlier.get(TUNED)), self._study)
        pairs = zip(self._pool.texts, self._pool.codes, strict=True)
        sampler.remember(SyntheticText(text, int(code)) for text, code in pairs)
        # Also what this corpus has of another series.
        sampler.remember(dict.fromkeys([*kept, *self._given]))
        spare = np.ceil(missing * (1 + _SPARE)).astype(np.int64)
        return sampler.sample(spare, on_text, series=f"{series}, after {len(kept)}")

    def _key(self, series: str) -> str:
        content = json.dumps({**self._made_by, "series": series}, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:24]


def _read(file: Path) -> list[SyntheticText]:
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines()
    return [SyntheticText(text, code) for code, text in map(json.loads, lines)]


def _of(texts: list[SyntheticText], code: int) -> list[SyntheticText]:
    return [text for text in texts if text.code == code]


def _counts(texts: list[SyntheticText], codes: int) -> NDArray[np.int64]:
    return np.bincount([text.code for text in texts], minlength=codes).astype(np.int64)
