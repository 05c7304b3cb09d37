"""Slots: places for texts that grow together, each at its own length.

`server.decoding.model_slots` has those of the library's models, which are refilled while others go on. Not every model
can be run so: `server.decoding.choice` tries it out, and one that can't runs in step, a batch at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch

from common.errors import ModelError
from common.models.architectures import Continuation, Tokens


class UnsuitableModelError(ModelError):
    """A model that doesn't keep keys and values by position. Texts of it grow in step."""


class Slots(ABC):
    """Places for texts, the first of which are in use.

    Attributes
    ----------
    refills
        Whether a text can begin while others go on.
    """

    refills: ClassVar[bool] = True

    @abstractmethod
    def begin(self, prompts: Mapping[int, Tokens]) -> None:
        """Begin a text for each prompt, by slot; what was there is lost."""

    @abstractmethod
    def move(self, source: int, target: int) -> None:
        """Let a text go on in another slot."""

    @abstractmethod
    def rest(self, slots: Sequence[int]) -> None:
        """In these slots nothing is written now; what comes out for them is nobody's."""

    @abstractmethod
    def next(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token in the slots that are in use.

        Parameters
        ----------
        tokens
            int64 of shape ``(slots in use,)``: what was drawn last; anything where a text has just begun.

        Returns
        -------
        Tensor
            Of shape ``(slots in use, vocabulary)``.
        """


class InStep(Slots):
    """A batch that begins and ends together, for models that are known by their prompts' continuation only."""

    refills = False

    def __init__(self, start: Callable[[Sequence[Tokens]], Continuation]) -> None:
        self._start = start
        self._continuation: Continuation | None = None
        self._fresh = False

    def begin(self, prompts: Mapping[int, Tokens]) -> None:
        """All at once."""
        self._continuation, self._fresh = self._start([prompts[slot] for slot in sorted(prompts)]), True

    def move(self, source: int, target: int) -> None:
        """Not here."""
        raise NotImplementedError

    def rest(self, slots: Sequence[int]) -> None:
        """They wait for the others."""

    def next(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of the whole batch."""
        if self._continuation is None:
            raise ModelError("generation: a text is to go on that wasn't begun")
        logits = self._continuation.next(None if self._fresh else tokens)
        self._fresh = False
        return logits
