"""Public sentences with their entities, which judge whether a corpus teaches a tagger."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from server.evaluation.ner import Tagged, Tagger, read_tagged


@dataclass(frozen=True, repr=False)
class LabelledSentences:
    """Sentences of both sides.

    Attributes
    ----------
    train
        Those that a first tagger learns from; it labels synthetic text.
    test
        Those that judge the taggers that learnt from such text.
    """

    train: Tagged
    test: Tagged

    @cached_property
    def teacher(self) -> Tagger:
        """The first tagger; no corpus has a part in it."""
        return Tagger(self.train)

    @cached_property
    def sha256(self) -> str:
        """Hash of all sentences with their tags."""
        sides = [[side.tokens, side.tags] for side in (self.train, self.test)]
        return hashlib.sha256(json.dumps(sides).encode()).hexdigest()

    @classmethod
    def load(cls, path: Path, column: str, train: Collection[str], test: Collection[str]) -> LabelledSentences:
        """Read a file; ``column`` says which side a sentence is on.

        Raises
        ------
        DataError
            If it can't be read, or has no entity on one side.
        """
        return cls(*(read_tagged(path, str(path), (column, values)) for values in (train, test)))
