"""Next-token accuracy: how often a small causal model that has read only the corpus knows a real text's next token.

The model is made here with random weights, so that nothing but its texts taught it anything; it is taught for the same
number of steps whatever the corpus. Tokens are pieces of the *test* texts' words: with tokens of its own, each corpus
would be asked other questions. Needs torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from server.evaluation.intervals import RESAMPLES, Estimate, of_resamples

Progress = Callable[[int, int], None]
Tokens = list[list[int]]

_END = "<end>"
_IGNORED = -100


@dataclass(frozen=True)
class SmallModel:
    """The model, and how it is taught.

    Attributes
    ----------
    vocabulary
        Tokens, at most.
    width, layers, heads
        Of a Llama.
    context
        Tokens of a text that are read.
    steps, batch
        Steps, and texts of a step.
    learning_rate
        Of AdamW, falling to 0.
    seed
        Of weights and order; no privacy hangs on it.
    """

    vocabulary: int = 2048
    width: int = 128
    layers: int = 2
    heads: int = 4
    context: int = 64
    steps: int = 400
    batch: int = 16
    learning_rate: float = 3e-3
    seed: int = 0


class Tokenizer:
    """Byte pairs learnt from the test texts; every text begins and ends with a mark."""

    def __init__(self, texts: Sequence[str], options: SmallModel) -> None:
        from tokenizers import Tokenizer as Bpe
        from tokenizers import models, pre_tokenizers, trainers

        self._bpe: Any = Bpe(models.BPE())
        self._bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=options.vocabulary, special_tokens=[_END], initial_alphabet=alphabet, show_progress=False
        )
        self._bpe.train_from_iterator(list(texts), trainer)
        self._end = self._bpe.token_to_id(_END)
        self._context = options.context

    def __len__(self) -> int:
        return int(self._bpe.get_vocab_size())

    def __call__(self, texts: Sequence[str]) -> Tokens:
        """Tokens of each text, with marks, cut to the context."""
        found = self._bpe.encode_batch(list(texts))
        return [[self._end, *encoding.ids, self._end][: self._context] for encoding in found]


def taught_accuracy(
    training: Tokens,
    tests: Tokens,
    vocabulary: int,
    options: SmallModel | None = None,
    progress: Progress = lambda done, total: None,
) -> Estimate:
    """Share of the test texts' tokens that a model taught on other texts puts first, with an interval over texts."""
    options = options or SmallModel()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        model = _model(vocabulary, options)
        _teach(model, training, options, progress)
    return of_ratio(*_right(model, tests, options.batch))


def most_frequent_accuracy(training: Tokens, tests: Tokens) -> float:
    """The same for always saying the most frequent token."""
    counts = Counter(token for text in training for token in text[1:])
    commonest = counts.most_common(1)[0][0]
    asked = [token for text in tests for token in text[1:]]
    return sum(token == commonest for token in asked) / len(asked)


def of_ratio(right: NDArray[np.int64], asked: NDArray[np.int64], seed: int = 0) -> Estimate:
    """Right answers over questions of all texts, ``(texts,)`` each, with an interval from resampled texts."""
    drawn = np.random.default_rng(seed).integers(len(right), size=(RESAMPLES, len(right)))
    return of_resamples(float(right.sum() / asked.sum()), right[drawn].sum(axis=1) / asked[drawn].sum(axis=1))


def _model(vocabulary: int, options: SmallModel) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=options.width, intermediate_size=4 * options.width,
            num_hidden_layers=options.layers, num_attention_heads=options.heads, tie_word_embeddings=True,
            max_position_embeddings=options.context, pad_token_id=0, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def _teach(model: Any, texts: Tokens, options: SmallModel, progress: Progress) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, total_steps=options.steps)
    chance = np.random.default_rng(options.seed)
    order: list[int] = []
    model.train()
    for step in range(1, options.steps + 1):
        while len(order) < options.batch:
            order += chance.permutation(len(texts)).tolist()
        batch, order = order[: options.batch], order[options.batch :]
        tokens, targets = _padded([texts[i] for i in batch])
        scores = model(input_ids=tokens, attention_mask=(targets != _IGNORED).long()).logits
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress(step, options.steps)


def _right(model: Any, texts: Tokens, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(right answers, questions) of each text."""
    model.eval()
    right, asked = np.zeros(len(texts), dtype=np.int64), np.zeros(len(texts), dtype=np.int64)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    for start in range(0, len(order), size):
        batch = order[start : start + size]
        tokens, targets = _padded([texts[i] for i in batch])
        with torch.no_grad():
            said = model(input_ids=tokens, attention_mask=(targets != _IGNORED).long()).logits.argmax(dim=-1)
        right[batch] = ((said == targets) & (targets != _IGNORED)).sum(dim=1).numpy()
        asked[batch] = (targets != _IGNORED).sum(dim=1).numpy()
    return right, asked


def _padded(texts: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, the token after each), ``(texts, longest - 1)``; what is padding isn't asked for."""
    longest = max(map(len, texts))
    tokens = torch.zeros(len(texts), longest, dtype=torch.long)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    lengths = torch.tensor([len(text) for text in texts])[:, None]
    targets = tokens[:, 1:].clone()
    targets[torch.arange(1, longest) >= lengths] = _IGNORED
    return tokens[:, :-1], targets
