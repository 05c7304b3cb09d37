"""What an evaluation works on: the texts on every side, and sets of equal size to compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from common.errors import DataError
from server.evaluation.ner import Tagged
from server.evaluation.surface import shuffled_words
from server.evaluation.texts import Texts
from server.evaluation.vectors import Unit, Vectors

Progress = Callable[[str, int, int], None]
"""What is being done, how much of it is done, and how much there is."""


class TooFewTextsError(DataError):
    """Texts are too few for a number, or what it needs wasn't given. It is left out; the others are there."""


@dataclass(frozen=True)
class Options:
    """How to evaluate.

    Attributes
    ----------
    most
        Texts of each side, at most, that are compared in embedding space and for leaks.
    encoder
        Folder of an encoder to fine-tune; unset leaves that out.
    next_token
        Whether to teach a small model next tokens.
    entities
        Public text with entities to train a first tagger on, and real text to test on; unset leaves that out.
    seed
        Of everything that is drawn; no privacy hangs on it.
    """

    most: int = 2000
    encoder: Path | None = None
    next_token: bool = False
    entities: tuple[Tagged, Tagged] | None = None
    seed: int = 0


@dataclass(frozen=True)
class Comparison:
    """Sets of the same number of texts: distances can be compared only between sets of one size.

    Attributes
    ----------
    target
        Real texts that all others are compared with.
    corpus
        Of the corpus.
    real
        Other real texts: as near to the target as a corpus could be expected to come.
    bad
        Texts that are as far as a bad corpus would be.
    real_words, bad_words
        What these are.
    """

    target: Texts
    corpus: Texts
    real: Texts
    bad: Texts
    real_words: str
    bad_words: str

    def __len__(self) -> int:
        return len(self.target)


@dataclass(frozen=True)
class Material:
    """Everything that is compared.

    Attributes
    ----------
    corpus
        The synthetic texts.
    test
        Real texts that had no part in the corpus.
    train
        Real texts that the corpus was made from.
    holdout
        Real texts that had no part in the corpus, for leaks; unset means the test texts.
    floor
        A corpus that any useful one must beat, such as a zero-shot generator's.
    """

    corpus: Texts
    test: Texts
    train: Texts | None
    holdout: Texts | None
    floor: Texts | None
    options: Options
    vectors: Vectors
    progress: Progress = lambda what, done, total: None

    def embedded(self, texts: Texts | Sequence[str], what: str) -> Unit:
        """Vectors of length 1, float32 ``(texts, dimension)``."""
        plain = texts.texts if isinstance(texts, Texts) else texts
        return self.vectors(plain, lambda done, total: self.progress(f"embedding {what}", done, total))

    @cached_property
    def comparison(self) -> Comparison:
        """The sets, drawn once for all numbers."""
        seed, corpus = self.options.seed, self.corpus
        if self.train is not None:
            target, real, words = self.test, self.train, f"{self.train.name} against the test texts"
        else:
            whole = self.test.drawn(len(self.test), seed)
            half = len(whole) // 2
            target, real = whole.at(range(half)), whole.at(range(half, 2 * half))
            words = "one half of the test texts against the other"
        number = min(self.options.most, *(len(t) for t in (target, real, corpus, self.floor or corpus)))
        target = target.drawn(number, seed)
        if self.floor is not None:
            bad, bad_words = self.floor.drawn(number, seed), f"{self.floor.name}"
        else:
            shuffled = tuple(shuffled_words(target.texts, seed))
            bad, bad_words = Texts("shuffled", shuffled, target.labels), "real words in random order and company"
        return Comparison(target, corpus.drawn(number, seed), real.drawn(number, seed), bad, words, bad_words)
