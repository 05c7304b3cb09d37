"""Distinct texts of the asked codes from the fine-tuned generator. Post-processing: costs no privacy.

`server.decoding` writes them, `server.filters` says which are kept; for what isn't, others are written, a bounded
number of times.
"""

from __future__ import annotations

import copy
import logging
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from common.models.generator import Generator, fast_bfloat16
from common.study import Pool, Study
from server.candidate_log import CandidateLog, Outcome
from server.decoding.choice import slots_for
from server.decoding.engine import Engine, Request
from server.decoding.sampling import text_key
from server.filters import Drops, Filters

__all__ = ["Drops", "OnText", "SyntheticText", "TextSampler"]

log = logging.getLogger("fedcorpus.server")

OnText = Callable[[int, int], None]
"""Called with (texts made, texts wanted)."""


@dataclass(frozen=True)
class SyntheticText:
    """One generated text and the index of the code it was generated under."""

    text: str
    code: int


class TextSampler:
    """Samples distinct texts for control codes from a generator as it stands when the sampler is made.

    The text that comes of a place (study seed, series, code, number, attempt) is always the same on one machine, but
    for rounding: a text's randomness is its own, but products of matrices round by how many rows they have.

    Parameters
    ----------
    expected
        Texts that it will give over all, and be told to remember; memory goes by it. Unset means the study's own.

    Attributes
    ----------
    drops
        What wasn't kept so far, and why.
    """

    def __init__(self, generator: Generator, study: Study, expected: int | None = None) -> None:
        architecture, tokenizer = generator.architecture, generator.tokenizer
        self._tokenizer = tokenizer
        self._options: Pool = study.pool
        self._prompts = generator.prompts(study.codes)
        self._model = _merged(generator, study.pool)
        slots = slots_for(self._model, architecture, self._prompts, self._options.batch_size)
        self._engine = Engine(
            slots,
            self._options.batch_size,
            tokenizer.eos_token_id,
            self._options.temperature,
            self._options.top_p,
            self._model.device,
        )
        self._context, self._room = architecture.context, architecture.room
        self._filters = Filters(
            study.codes, study.pool, expected or study.pool.size + round(study.corpus.size * study.corpus.choice)
        )
        self.drops = Drops()

    def sample(
        self,
        wanted: NDArray[np.int64],
        on_text: OnText = lambda _made, _wanted: None,
        *,
        series: str | None = None,
        record: CandidateLog | None = None,
    ) -> list[SyntheticText]:
        """Generate ``wanted[c]`` distinct texts for every code c, none of which this sampler has given before.

        Parameters
        ----------
        wanted
            int64 of shape ``(codes,)``.
        series
            Of texts: another series of the same study gives other texts. Unset means a series of its own for every
            number of texts that were given or remembered before.
        record
            Where outcomes are kept as they come. Those that it holds already aren't generated again.

        Returns
        -------
        list of SyntheticText
            Ordered by code. Shorter than asked if the tries ran out; count per code to see where.
        """
        orders = _Orders(wanted, self._options.max_tries)
        name = series if series is not None else f"after {self._filters.kept}"
        made: list[SyntheticText] = []
        for order, outcome in self._outcomes(orders, name, record):
            if outcome.dropped:
                self.drops.counts[outcome.dropped] += 1
                orders.again(order)
                continue
            self.drops.cut += outcome.cut
            made.append(SyntheticText(outcome.text, outcome.code))
            on_text(len(made), int(wanted.sum()))
        if len(made) < wanted.sum():
            missing = int(wanted.sum()) - len(made)
            log.info("%d of %d texts couldn't be made; dropped: %s", missing, wanted.sum(), self.drops)
        return sorted(made, key=lambda text: text.code)

    def remember(self, texts: Iterable[SyntheticText]) -> None:
        """Take texts that an earlier sampler gave for given: they are duplicates from now on."""
        for text in texts:
            self._filters.remember(text.text, text.code)

    def _outcomes(self, orders: _Orders, series: str, record: CandidateLog | None) -> Iterator[tuple[_Order, Outcome]]:
        """What becomes of the orders, in their order: first what is on record, then what is generated."""
        for outcome in record.earlier() if record else ():
            order = orders.next()
            if order is None:
                return
            if not outcome.dropped:
                self._filters.remember(outcome.text, outcome.code)
            yield order, outcome
        waiting: deque[_Order] = deque()

        def source() -> Request | None:
            order = orders.next()
            if order is None:
                return None
            waiting.append(order)
            return self._request(order, series)

        for written in self._engine.texts(source, self._options.max_new_tokens):
            order = waiting.popleft()
            text = _tidy(self._tokenizer.decode(written.tokens, skip_special_tokens=True))
            dropped = self._filters.reason(text, order.code, ended=written.ended)
            outcome = Outcome(order.code, "" if dropped else text, dropped, not written.ended)
            if record:
                record.add(outcome)
            yield order, outcome

    def _request(self, order: _Order, series: str) -> Request:
        prompt, longest = self._prompts[order.code], self._options.max_new_tokens
        if self._context is not None:
            longest = min(longest, self._room(prompt, self._context))
        key = text_key(self._options.seed, series, order.code, order.number, order.attempt)
        return Request(prompt, key, longest)


@dataclass(frozen=True)
class _Order:
    """A text to make: which of its code, and which try at it."""

    code: int
    number: int
    attempt: int


class _Orders:
    """All texts that are wanted, code by code; then those that have to be made again. Always the same sequence."""

    def __init__(self, wanted: NDArray[np.int64], tries: int) -> None:
        self._first = (
            _Order(int(code), number, 0) for code in np.flatnonzero(wanted > 0) for number in range(int(wanted[code]))
        )
        self._again: deque[_Order] = deque()
        self._tries = tries

    def next(self) -> _Order | None:
        """None if there is none now; one that failed may come back later."""
        order = next(self._first, None)
        return order if order is not None else self._again.popleft() if self._again else None

    def again(self, order: _Order) -> None:
        """Try once more, if a try is left."""
        if order.attempt + 1 < self._tries:
            self._again.append(_Order(order.code, order.number, order.attempt + 1))


def _merged(generator: Generator, options: Pool) -> Any:
    """A copy of the model with the adapter merged into its weights: sampling then pays nothing for LoRA.

    Merged in float32 and rounded once: added to bfloat16 weights, a small update would be lost weight by weight. The
    generator's own model stays as it is.
    """
    fast = options.dtype == "bfloat16" or (options.dtype == "auto" and fast_bfloat16(generator.device.type))
    merged = copy.deepcopy(generator.model).float().merge_and_unload()
    return merged.to(torch.bfloat16 if fast else torch.float32).eval()


def _tidy(raw: str) -> str:
    """NFC, without control characters, blanks squeezed: a candidate is shown to people and counted as data."""
    text = unicodedata.normalize("NFC", raw)
    if not text.isprintable():
        text = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(text.split())
