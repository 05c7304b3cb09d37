"""A small pretrained encoder, fine-tuned on one set of texts and asked for the labels of another. Needs torch.

The encoder is a folder in the format of sentence-transformers or transformers; its tokens' last vectors are averaged,
and a linear layer on top tells the label. All of its weights are trained. Nothing private is protected here: it is for
texts that may be published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.errors import ModelError

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class FineTuning:
    """How the encoder is trained.

    Attributes
    ----------
    epochs
        Times that every text is seen.
    batch
        Texts of a step.
    learning_rate
        Of AdamW, at its highest: it rises over the first tenth of the steps and falls to 0 over the rest.
    tokens
        Of a text that are read.
    seed
        Of the new layer and of the order; no privacy hangs on it.
    """

    epochs: int = 3
    batch: int = 16
    learning_rate: float = 1e-4
    tokens: int = 128
    seed: int = 0


def fine_tuned_predictions(
    folder: Path,
    texts: Sequence[str],
    labels: Sequence[str],
    tests: Sequence[str],
    options: FineTuning | None = None,
    progress: Progress = lambda done, total: None,
) -> list[str]:
    """The label of each test text by an encoder that was fine-tuned on labelled texts.

    Raises
    ------
    ModelError
        If the folder isn't an encoder's.
    """
    options = options or FineTuning()
    names = sorted(set(labels))
    if len(names) == 1:
        return names * len(tests)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        classifier = _Classifier(folder, len(names), options.tokens)
        _train(classifier, texts, [names.index(label) for label in labels], options, progress)
        return [names[place] for place in _predicted(classifier, tests, options.batch)]


class _Classifier:
    """Encoder, mean over the tokens, linear layer."""

    def __init__(self, folder: Path, labels: int, tokens: int) -> None:
        self._tokenizer, self.encoder = _loaded(folder)
        self._tokens = min(tokens, getattr(self.encoder.config, "max_position_embeddings", tokens))
        self.head = torch.nn.Linear(self.encoder.config.hidden_size, labels)

    def __call__(self, texts: Sequence[str]) -> torch.Tensor:
        """Scores of the labels, ``(texts, labels)``."""
        batch = self._tokenizer(
            list(texts), padding=True, truncation=True, max_length=self._tokens, return_tensors="pt"
        )
        there = batch["attention_mask"][:, :, None].float()
        vectors = self.encoder(**batch).last_hidden_state
        return self.head((vectors * there).sum(dim=1) / there.sum(dim=1))

    def parameters(self) -> list[torch.nn.Parameter]:
        """All of them; all are trained."""
        return [*self.encoder.parameters(), *self.head.parameters()]


def _loaded(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModel, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        encoder = AutoModel.from_pretrained(str(folder), local_files_only=True, use_safetensors=True)
    except (OSError, ValueError) as cause:
        raise ModelError(
            f"--fine-tune {folder}: can't be loaded; the folder of an encoder with its tokenizer is needed, with "
            "weights in safetensors"
        ) from cause
    return tokenizer, encoder.float()


def _train(
    classifier: _Classifier, texts: Sequence[str], labels: Sequence[int], options: FineTuning, progress: Progress
) -> None:
    batches = [
        batch
        for epoch in range(options.epochs)
        for batch in _batches(texts, options.batch, np.random.default_rng((options.seed, epoch)))
    ]
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=options.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share(step, len(batches)))
    classifier.encoder.train()
    for step, batch in enumerate(batches, start=1):
        loss = torch.nn.functional.cross_entropy(
            classifier([texts[i] for i in batch]), torch.tensor([labels[i] for i in batch])
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(classifier.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress(step, len(batches))


def _predicted(classifier: _Classifier, tests: Sequence[str], size: int) -> list[int]:
    classifier.encoder.eval()
    found = [0] * len(tests)
    order = sorted(range(len(tests)), key=lambda i: len(tests[i]))
    for start in range(0, len(order), 4 * size):
        batch = order[start : start + 4 * size]
        with torch.no_grad():
            places = classifier([tests[i] for i in batch]).argmax(dim=1).tolist()
        for i, place in zip(batch, places, strict=True):
            found[i] = place
    return found


def _batches(texts: Sequence[str], size: int, chance: np.random.Generator) -> Iterator[list[int]]:
    """Batches in random order; within a few batches, texts of about one length go together, which saves padding."""
    order = chance.permutation(len(texts)).tolist()
    batches = []
    for start in range(0, len(order), 8 * size):
        near = sorted(order[start : start + 8 * size], key=lambda i: len(texts[i]))
        batches += [near[i : i + size] for i in range(0, len(near), size)]
    for place in chance.permutation(len(batches)).tolist():
        yield batches[place]


def _share(step: int, steps: int) -> float:
    """Of the highest learning rate."""
    rise = max(1, steps // 10)
    return min((step + 1) / rise, max(0.0, (steps - step) / max(1, steps - rise)))
