"""A small generator that is pre-trained here on other public text in minutes, so that a whole table fits into an hour.

A Llama with byte-pair tokens of its own. It reads every text after its labels, in the form of a study's prompts, so it
has seen what a prompt is; of the experiment's own documents it has seen none.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from common.configuration import Section
from common.errors import DataError
from common.site.formats import read_columns
from server.experiments.cache import Earlier, OnProgress, Step
from server.experiments.notes import write_notes
from server.workspace import write_atomically

if TYPE_CHECKING:
    from server.experiments.situation import Situation

END = "<|end|>"

_KEPT_EVERY = 100
"""Steps."""


class PublicText(Section):
    """A file of public text."""

    file: str = Field(description="File inside the data folder.")
    text_column: str = Field(default="text", description="Column with the text.")
    label_columns: dict[str, str] = Field(
        default_factory=dict, description="What a prompt calls a label -> its column; read before the text."
    )


class Pretraining(Section):
    """How a small generator is made."""

    texts: tuple[PublicText, ...] = Field(description="Public text; none of it may be the experiment's.", min_length=1)
    vocabulary: int = Field(default=4096, ge=300, description="Tokens, learnt from the text.")
    layers: int = Field(default=6, ge=1, description="Layers.")
    width: int = Field(default=256, ge=8, description="Width; a multiple of four times the heads.")
    heads: int = Field(default=4, ge=1, description="Attention heads.")
    context: int = Field(default=160, ge=16, description="Most tokens of prompt and text; what is longer is cut.")
    steps: int = Field(default=1500, ge=1, description="Steps of AdamW.")
    batch_size: int = Field(default=16, ge=1, description="Texts of a step.")
    learning_rate: float = Field(default=1e-3, gt=0, description="At its highest; it rises at first and falls to 0.")
    seed: int = Field(default=0, ge=0, description="Of weights and order.")

    @property
    def weights(self) -> int:
        """How many the model has, roughly: of its layers and of its tokens' vectors."""
        return 12 * self.layers * self.width**2 + self.vocabulary * self.width


class PretrainedModel(Step):
    """The model's folder: ``model/`` in Hugging Face format."""

    kind = "model"
    sources = ("server/experiments/pretraining.py",)

    def __init__(self, options: Pretraining, data: Path) -> None:
        self._options, self._data = options, data

    @property
    def units(self) -> float:
        """Weights times tokens."""
        options = self._options
        return float(options.weights) * options.steps * options.batch_size * options.context

    def inputs(self, earlier: Earlier) -> dict[str, Any]:
        """Options and files."""
        files = [hashlib.sha256(self._file(text).read_bytes()).hexdigest() for text in self._options.texts]
        return {"options": self._options.model_dump(mode="json"), "files": files}

    def make(self, earlier: Earlier, out: Path, work: Path) -> None:
        """Learn tokens, then the model. Goes on after the last hundred whole steps."""
        texts = [text for source in self._options.texts for text in self._texts(source)]
        loss = pretrain(texts, self._options, out / "model", work, self.progress)
        write_notes(out, {"loss of pre-training": loss, "texts of pre-training": float(len(texts))})

    def _file(self, source: PublicText) -> Path:
        path = self._data / source.file
        if not path.is_file():
            raise DataError(
                f"{path}: no such file; a model of the experiment is pre-trained on it (--data names its folder)"
            )
        return path

    def _texts(self, source: PublicText) -> Iterator[tuple[str, str]]:
        """(prompt, text)."""
        for row in read_columns(self._file(source), [source.text_column, *source.label_columns.values()]):
            labels = "".join(f"{name}: {row[column]}\n" for name, column in source.label_columns.items())
            if row[source.text_column]:
                yield f"{labels}Text:", row[source.text_column]


def pretrained(situation: Situation, data: Path) -> Sequence[Step]:
    """The step that makes a cell's model, if it is made here."""
    options = situation.experiment.models[situation.cell.model].pretraining
    return () if options is None else (PretrainedModel(options, data),)


def pretrain(
    texts: Sequence[tuple[str, str]],
    options: Pretraining,
    folder: Path,
    work: Path,
    progress: OnProgress = lambda _done, _total: None,
) -> float:
    """Make a model of (prompt, text) pairs in ``folder``; returns the mean loss of the last hundred steps.

    Parameters
    ----------
    work
        Where the state is kept, so that a second call with the same texts and options goes on.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer([prompt + " " + text for prompt, text in texts], options.vocabulary)
    encoded = tokenizer([f"{prompt} {text}" for prompt, text in texts])["input_ids"]
    rows = [[*ids[: options.context - 1], tokenizer.eos_token_id] for ids in encoded]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=options.width, intermediate_size=int(options.width * 8 / 3),
            num_hidden_layers=options.layers, num_attention_heads=options.heads, num_key_value_heads=options.heads,
            max_position_embeddings=options.context, tie_word_embeddings=True,
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eos_token_id),
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        losses = _learn(model, rows, options, work / "state.pt", progress)
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "made-from.json").write_text(json.dumps(options.model_dump(mode="json"), indent=1), encoding="utf-8")
    return float(np.mean(losses[-100:]))


def _learn(
    model: Any, rows: Sequence[Sequence[int]], options: Pretraining, state: Path, progress: OnProgress
) -> list[float]:
    """The loss of every step."""
    import torch

    from common.models.architectures import Batch

    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.01)
    losses: list[float] = []
    if state.exists():
        kept = torch.load(state, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        losses = kept["losses"]
    rise = max(1, options.steps // 20)
    model.train()
    batches = _batches([len(row) for row in rows], options, np.random.default_rng(options.seed))
    for step, numbers in enumerate(islice(batches, len(losses), options.steps), start=len(losses)):
        share = min((step + 1) / rise, (options.steps - step) / max(options.steps - rise, 1))
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * share
        # Nothing is a prompt here: every token but the first is to be predicted.
        batch = Batch([[]] * len(numbers), [rows[i] for i in numbers])
        logits = model(**batch.inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        progress(len(losses), options.steps)
        if len(losses) % _KEPT_EVERY == 0:
            content = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}, content)
            write_atomically(state, content.getvalue())
    return losses


def _batches(lengths: Sequence[int], options: Pretraining, chance: np.random.Generator) -> Iterator[list[int]]:
    """Batches for ever, in random order; texts of about one length go together, which saves padding."""
    size = options.batch_size
    while True:
        order = chance.permutation(len(lengths)).tolist()
        batches = []
        for start in range(0, len(order), 20 * size):
            near = sorted(order[start : start + 20 * size], key=lambda i: lengths[i])
            batches += [near[i : i + size] for i in range(0, len(near), size)]
        for place in chance.permutation(len(batches)).tolist():
            yield batches[place]


def _tokenizer(texts: Sequence[str], vocabulary: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END)
