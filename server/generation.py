"""Sampling texts from the fine-tuned generator, in batches and with a KV cache. Post-processing: costs no privacy.

Empty texts, duplicates and echoes of the prompt are dropped and made again, a bounded number of times.
"""

from __future__ import annotations

import copy
import logging
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from common.codes import ControlCodes
from common.models.generator import Generator
from common.study import Pool, Study

log = logging.getLogger("fedcorpus.server")

HEAD = 512
"""Tokens that are ordered first when sampling; a nucleus that is larger costs a sort of the vocabulary."""

OnText = Callable[[int, int], None]
"""Called with (texts made, texts wanted)."""


@dataclass(frozen=True)
class SyntheticText:
    """One generated text and the index of the code it was generated under."""

    text: str
    code: int


@dataclass
class Drops:
    """Why generated texts weren't kept."""

    counts: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in sorted(self.counts.items())) or "none"


class TextSampler:
    """Samples distinct texts for control codes from a generator as it stands when the sampler is made."""

    def __init__(self, generator: Generator, study: Study) -> None:
        self._architecture, self._tokenizer = generator.architecture, generator.tokenizer
        self._model = _merged(generator)
        self._codes: ControlCodes = study.codes
        self._options: Pool = study.pool
        self._prompts = generator.prompts(study.codes)
        self._seen: set[str] = set()
        self.drops = Drops()

    def sample(self, wanted: NDArray[np.int64], on_text: OnText = lambda _made, _wanted: None) -> list[SyntheticText]:
        """Generate ``wanted[c]`` distinct texts for every code c, none of which this sampler has given before.

        Parameters
        ----------
        wanted
            int64 of shape ``(codes,)``.

        Returns
        -------
        list of SyntheticText
            Ordered by code. Shorter than asked if the tries ran out; count per code to see where.
        """
        missing, made = wanted.copy(), list[SyntheticText]()
        for attempt in range(self._options.max_tries):
            for text in self._attempt(missing.copy(), attempt):
                missing[text.code] -= 1
                made.append(text)
                on_text(len(made), int(wanted.sum()))
            if not missing.any():
                break
        if missing.any():
            log.warning("%d of %d texts couldn't be made; dropped: %s", missing.sum(), wanted.sum(), self.drops)
        return sorted(made, key=lambda text: text.code)

    def remember(self, texts: Iterable[str]) -> None:
        """Take texts that an earlier sampler gave for given: they are duplicates from now on."""
        self._seen.update(text.casefold() for text in texts)

    def _attempt(self, missing: NDArray[np.int64], attempt: int) -> Iterator[SyntheticText]:
        jobs = np.repeat(np.arange(missing.size), missing)
        for start in range(0, jobs.size, self._options.batch_size):
            batch = jobs[start : start + self._options.batch_size]
            for code, raw in zip(batch, self._generate(batch, attempt, start), strict=True):
                text = _tidy(raw)
                reason = self._reason_to_drop(text, int(code))
                if reason:
                    self.drops.counts[reason] += 1
                    continue
                self._seen.add(text.casefold())
                yield SyntheticText(text, int(code))

    def _generate(self, codes: NDArray[np.int64], attempt: int, start: int) -> list[str]:
        prompts = [self._prompts[code] for code in codes]
        # Of its own, so that the process's random state stays as it is.
        source = torch.Generator(self._model.device)
        source.manual_seed(_stream(self._options.seed, len(self._seen), attempt, start))
        with torch.inference_mode():
            output = self._decode(prompts, source)
        decoded: list[str] = self._tokenizer.batch_decode(output, skip_special_tokens=True)
        return decoded

    def _decode(self, prompts: Sequence[Sequence[int]], source: torch.Generator | None = None) -> list[list[int]]:
        """Continue prompts token by token; ends with each row's end token or the length limit."""
        continuation, end = self._architecture.start(self._model, prompts), self._tokenizer.eos_token_id
        drawn: list[torch.Tensor] = []
        ended: Any = False
        for _ in range(self._longest(prompts)):
            logits = continuation.next(drawn[-1] if drawn else None).float() / self._options.temperature
            drawn.append(nucleus_sample(logits, self._options.top_p, source))
            ended |= drawn[-1] == end
            if bool(ended.all()):
                break
        return [_until(end, row) for row in torch.stack(drawn, dim=1).tolist()]

    def _longest(self, prompts: Sequence[Sequence[int]]) -> int:
        context = self._architecture.context
        if context is None:
            return self._options.max_new_tokens
        return min(self._options.max_new_tokens, *(self._architecture.room(prompt, context) for prompt in prompts))

    def _reason_to_drop(self, text: str, code: int) -> str:
        if not any(character.isalnum() for character in text):
            return "empty"
        if self._is_echo(text, code):
            return "prompt echo"
        if text.casefold() in self._seen:
            return "duplicate"
        return ""

    def _is_echo(self, text: str, code: int) -> bool:
        """The text repeats the condition instead of following it."""
        lines = [line.casefold() for line in self._codes.prompt(code).splitlines() if line.strip()]
        return any(line in text.casefold() for line in lines if ": " in line or line == "text:") or (
            bool(self._codes.preamble) and self._codes.preamble.casefold() in text.casefold()
        )


def nucleus_sample(logits: torch.Tensor, top_p: float, source: torch.Generator | None = None) -> torch.Tensor:
    """One token a row from the nucleus: the smallest set of most likely tokens whose mass reaches ``top_p``. Exact.

    The nucleus is nearly always small, so only the `HEAD` most likely tokens are ordered; the whole vocabulary is, for
    the rows whose head has less mass than ``top_p``.

    Parameters
    ----------
    logits
        float32 of shape ``(rows, vocabulary)``, divided by the temperature.
    source
        Of randomness, on the logits' device; the process's own if it isn't given.

    Returns
    -------
    Tensor
        int64 of shape ``(rows,)``.
    """
    if top_p >= 1:
        return torch.multinomial(logits.softmax(dim=-1), 1, generator=source)[:, 0]
    log_total = logits.logsumexp(dim=-1, keepdim=True)
    tokens = torch.empty(logits.shape[0], dtype=torch.long, device=logits.device)
    waiting = torch.arange(logits.shape[0], device=logits.device)
    for size in (min(HEAD, logits.shape[1]), logits.shape[1]):
        values, order = logits[waiting].topk(size, dim=-1)
        mass = (values - log_total[waiting]).exp()
        before = mass.cumsum(dim=-1) - mass
        whole = (before[:, -1] + mass[:, -1] >= top_p) | (size == logits.shape[1])
        drawn = torch.multinomial(mass * (before < top_p), 1, generator=source)
        tokens[waiting[whole]] = order.gather(1, drawn)[whole, 0]
        waiting = waiting[~whole]
        if not waiting.numel():
            break
    return tokens


def _merged(generator: Generator) -> Any:
    """A copy of the model with the adapter merged into its weights: sampling then pays nothing for LoRA.

    Merged in float32 and rounded once: added to bfloat16 weights, a small update would be lost weight by weight. The
    generator's own model stays as it is.
    """
    return copy.deepcopy(generator.model).float().merge_and_unload().to(generator.dtype).eval()


def _until(end: int, tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(end)] if end in tokens else tokens


def _tidy(raw: str) -> str:
    """NFC, without control characters, blanks squeezed: a candidate is shown to people and counted as data."""
    visible = "".join(c if c.isprintable() else " " for c in unicodedata.normalize("NFC", raw))
    return " ".join(visible.split())


def _stream(seed: int, *position: int) -> int:
    """A public seed for one batch; sampling of synthetic text is not a privacy mechanism."""
    return int(np.random.SeedSequence([seed, *position]).generate_state(1, np.uint64)[0] >> 1)
