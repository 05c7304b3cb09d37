"""The decode loop: a slot whose text has ended takes the next one at once; no text waits for the longest of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from server.decoding.sampling import Randomness, nucleus_sample
from server.decoding.slots import Slots

_FEWER, _SIZES = 8, 8
"""At the end, when there are no more texts to begin, slots are given up by so many, and for so many sizes at most: what
a matrix product of another size needs is prepared anew, and kept."""


@dataclass(frozen=True)
class Request:
    """A text to write.

    Attributes
    ----------
    prompt
        Token ids.
    key
        Of its randomness: the same text comes of the same key.
    longest
        Most tokens it may have.
    """

    prompt: Sequence[int]
    key: int
    longest: int


@dataclass(frozen=True)
class Continued:
    """A text as the model wrote it.

    Attributes
    ----------
    tokens
        Without the end token.
    ended
        Whether the model ended it; else it was cut.
    """

    tokens: Sequence[int]
    ended: bool


Source = Callable[[], Request | None]
"""Gives the next request; None if there is none for now. It is asked again after every text that was given."""


class Engine:
    """Writes texts in slots.

    Parameters
    ----------
    slots
        Of a model.
    count
        How many are used at most.
    end
        The end-of-text token.
    temperature, top_p
        Of the sampling.
    """

    def __init__(
        self, slots: Slots, count: int, end: int, temperature: float, top_p: float, device: torch.device
    ) -> None:
        self._slots, self._count, self._end, self._device = slots, count, end, device
        self._temperature, self._top_p = temperature, top_p

    def texts(self, source: Source, longest: int) -> Iterator[Continued]:
        """Texts in the order of their requests, however long each takes.

        Parameters
        ----------
        longest
            Most tokens of any text.
        """
        going = _Going(self._count, longest)
        while True:
            # Not around what is given: whoever takes a text may do other things with torch.
            with torch.inference_mode():
                self._begin(going, source)
                if not going.used:
                    return
                self._step(going)
            yield from going.in_order()

    def _begin(self, going: _Going, source: Source) -> None:
        """Fill free slots; give up those that stay free."""
        prompts = {}
        if self._slots.refills or not going.busy.any():
            for slot in np.flatnonzero(~going.busy).tolist():
                request = source()
                if request is None:
                    break
                going.begin(slot, request)
                prompts[slot] = request.prompt
        if not going.busy.any():
            going.used = 0
            return
        if prompts:
            self._slots.begin(prompts)
            going.used = max(going.used if self._slots.refills else 0, max(prompts) + 1)
        if self._slots.refills:
            going.shrink(self._slots)
            self._slots.rest(np.flatnonzero(~going.busy[: going.used]).tolist())

    def _step(self, going: _Going) -> None:
        tokens = torch.from_numpy(going.last[: going.used]).to(self._device)
        logits = self._slots.next(tokens).float() / self._temperature
        drawn = nucleus_sample(logits, self._top_p, going.randomness)
        going.take(drawn.cpu().numpy(), self._end)


class _Going:
    """The texts in the slots, and those that wait for an earlier one."""

    def __init__(self, count: int, longest: int) -> None:
        self.used = 0
        self.busy = np.zeros(count, dtype=bool)
        self.last = np.zeros(count, dtype=np.int64)
        self.randomness = Randomness([0] * count)
        self._places = np.zeros(count, dtype=np.int64)
        self._drawn = np.zeros((count, longest), dtype=np.int64)
        self._lengths = np.zeros(count, dtype=np.int64)
        self._limits = np.zeros(count, dtype=np.int64)
        self._done: dict[int, Continued] = {}
        self._begun = self._given = 0

    def begin(self, slot: int, request: Request) -> None:
        """Put a text into a slot."""
        self.busy[slot] = True
        self._places[slot], self._lengths[slot], self._limits[slot] = self._begun, 0, request.longest
        self.randomness.begin(slot, request.key)
        self._begun += 1

    def take(self, drawn: NDArray[np.int64], end: int) -> None:
        """Add a token to each text in use; those that end with it leave their slots."""
        rows = np.flatnonzero(self.busy[: self.used])
        self.last[: self.used] = drawn
        ended = drawn[rows] == end
        goes_on = rows[~ended]
        self._drawn[goes_on, self._lengths[goes_on]] = drawn[goes_on]
        self._lengths[goes_on] += 1
        over = ended | (self._lengths[rows] >= self._limits[rows])
        for slot, by_itself in zip(rows[over].tolist(), ended[over].tolist(), strict=True):
            tokens = self._drawn[slot, : self._lengths[slot]].tolist()
            self._done[int(self._places[slot])] = Continued(tokens, by_itself)
            self.busy[slot] = False

    def in_order(self) -> Iterator[Continued]:
        """Texts that have ended and that no earlier one is missing before."""
        while self._given in self._done:
            text = self._done.pop(self._given)
            self._given += 1
            yield text

    def shrink(self, slots: Slots) -> None:
        """Use fewer slots, if so many are free."""
        fewer = max(_FEWER, -(-self.busy.size // _SIZES))
        wanted = -(-int(self.busy.sum()) // fewer) * fewer
        if wanted >= self.used:
            return
        free = iter(np.flatnonzero(~self.busy[:wanted]).tolist())
        for source in (wanted + np.flatnonzero(self.busy[wanted : self.used])).tolist():
            self._move(source, next(free), slots)
        self.used = wanted

    def _move(self, source: int, target: int, slots: Slots) -> None:
        slots.move(source, target)
        self.randomness.move(source, target)
        for array in (self.busy, self.last, self._places, self._drawn, self._lengths, self._limits):
            array[target] = array[source]
        self.busy[source] = False
