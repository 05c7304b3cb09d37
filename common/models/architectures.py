"""Kinds of language models, by how a prompt becomes a text: one class each, chosen from the model's configuration.

A causal model reads the prompt and goes on with the text. An encoder-decoder reads the prompt in its encoder and writes
the text with its decoder. Everything else that this system does with a model is the same for both. A new kind is a
class here and its place in `ARCHITECTURES`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from common.errors import ModelError

IGNORED = -100
"""The target of a position that isn't the text's."""

Tokens = Sequence[int]


class Batch:
    """Prompts and texts, right-padded, as a model reads them. Private if the texts are.

    Padding is masked by attention masks, never by the padding id, which many tokenizers share with the end-of-text
    token.

    Parameters
    ----------
    prompts, texts
        Token ids for a causal model. `Generator.batch` makes one for any model.

    Attributes
    ----------
    inputs
        Keyword arguments of the model, tensors of shape ``(documents, positions)``; the number of positions may differ
        between an encoder's and a decoder's.
    targets
        int64 of shape ``(documents, positions)``, aligned with the model's logits: the token that each of them should
        predict, or `IGNORED`.
    """

    def __init__(self, prompts: Sequence[Tokens], texts: Sequence[Tokens]) -> None:
        rows = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
        ids, mask = _padded(rows)
        self.inputs: Mapping[str, torch.Tensor] = {"input_ids": ids, "attention_mask": mask}
        self.targets = torch.full_like(ids, IGNORED)
        for index, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
            # Nothing comes before the first token of all, so nothing predicts it.
            first = max(len(prompt), 1)
            self.targets[index, first - 1 : max(len(row) - 1, 0)] = torch.tensor(row[first:], dtype=torch.long)

    @classmethod
    def of(cls, inputs: Mapping[str, torch.Tensor], targets: torch.Tensor) -> Batch:
        """A batch of tensors that are there."""
        batch = cls.__new__(cls)
        batch.inputs, batch.targets = dict(inputs), targets
        return batch

    @property
    def documents(self) -> int:
        """Number of documents."""
        return int(self.targets.shape[0])

    @property
    def positions(self) -> set[int]:
        """Numbers of positions that an input or output of the model has."""
        return {int(tensor.shape[1]) for tensor in self.inputs.values()}

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on a device."""
        return Batch.of({name: tensor.to(device) for name, tensor in self.inputs.items()}, self.targets.to(device))


class Continuation(ABC):
    """Texts that grow token by token, one for each prompt, from keys and values that are kept."""

    @abstractmethod
    def next(self, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of every text's next token.

        Parameters
        ----------
        tokens
            int64 of shape ``(rows,)``: what was drawn last; None at the start.

        Returns
        -------
        Tensor
            Of shape ``(rows, vocabulary)``.
        """


class Architecture(ABC):
    """A kind of language model.

    Parameters
    ----------
    config, tokenizer
        Of the model, as transformers reads them.

    Attributes
    ----------
    task_type
        Its name in peft.
    context
        Most positions that the model was made for; None if it has no limit.
    """

    task_type: ClassVar[str]
    loader: ClassVar[Any]

    def __init__(self, config: Any, tokenizer: Any) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.context: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)

    @classmethod
    @abstractmethod
    def fits(cls, config: Any) -> bool:
        """Whether a model is of this kind."""

    @classmethod
    def load(cls, folder: Path, **options: Any) -> Any:
        """The model in a folder: no code of its own, no pickled weights, nothing from elsewhere."""
        return cls.loader.from_pretrained(
            str(folder), trust_remote_code=False, use_safetensors=True, local_files_only=True, **options
        )

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, with the end-of-text token."""

    @abstractmethod
    def room(self, prompt: Tokens, most: int) -> int:
        """Tokens that a text may have after ``prompt`` where the model is to take at most ``most``."""

    @abstractmethod
    def batch(self, prompts: Sequence[Tokens], texts: Sequence[Tokens]) -> Batch:
        """Prompts and texts as the model reads them."""

    @abstractmethod
    def start(self, model: Any, prompts: Sequence[Tokens]) -> Continuation:
        """Begin a text for each prompt."""


class Causal(Architecture):
    """Reads the prompt and goes on: Llama, GPT-2, Gemma, Qwen2, OPT and their like."""

    task_type = "CAUSAL_LM"
    loader = AutoModelForCausalLM

    @classmethod
    def fits(cls, config: Any) -> bool:
        """Every model that isn't another kind."""
        return not config.is_encoder_decoder

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """A blank before the text, as after the prompt; no other special token than the end of the text."""
        encoded = self.tokenizer([f" {text}" for text in texts], add_special_tokens=False)["input_ids"]
        return [[*ids, self.tokenizer.eos_token_id] for ids in encoded]

    def room(self, prompt: Tokens, most: int) -> int:
        """The prompt comes off."""
        return most - len(prompt)

    def batch(self, prompts: Sequence[Tokens], texts: Sequence[Tokens]) -> Batch:
        """One row for both; the text's tokens are its targets."""
        return Batch(prompts, texts)

    def start(self, model: Any, prompts: Sequence[Tokens]) -> Continuation:
        """From left-padded prompts."""
        return _CausalContinuation(model, prompts, self.tokenizer.pad_token_id)


class EncoderDecoder(Architecture):
    """Reads the prompt in an encoder and writes the text with a decoder: BART, T5 and their like.

    Attributes
    ----------
    first
        The token that the decoder reads before the text.

    Raises
    ------
    ModelError
        If the configuration doesn't say with which token the decoder starts.
    """

    task_type = "SEQ_2_SEQ_LM"
    loader = AutoModelForSeq2SeqLM

    def __init__(self, config: Any, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        start = getattr(config, "decoder_start_token_id", None)
        if start is None:
            raise ModelError("generator.base: its config.json has no decoder_start_token_id; one is needed")
        self.first = int(start)

    @classmethod
    def fits(cls, config: Any) -> bool:
        """As the configuration says."""
        return bool(config.is_encoder_decoder)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """With the special tokens that the tokenizer has for a text, of which the end of the text is one."""
        end = self.tokenizer.eos_token_id
        encoded = self.tokenizer(list(texts))["input_ids"]
        return [ids if ids[-1:] == [end] else [*ids, end] for ids in encoded]

    def room(self, prompt: Tokens, most: int) -> int:
        """All of it: the prompt is the encoder's."""
        return most

    def batch(self, prompts: Sequence[Tokens], texts: Sequence[Tokens]) -> Batch:
        """The decoder reads the text one token late."""
        ids, mask = _padded(prompts)
        decoded, decoded_mask = _padded([[self.first, *text[:-1]] for text in texts])
        targets, is_text = _padded(texts)
        inputs = {
            "input_ids": ids,
            "attention_mask": mask,
            "decoder_input_ids": decoded,
            "decoder_attention_mask": decoded_mask,
        }
        return Batch.of(inputs, targets.masked_fill_(is_text == 0, IGNORED))

    def start(self, model: Any, prompts: Sequence[Tokens]) -> Continuation:
        """The encoder runs once."""
        return _DecoderContinuation(model, prompts, self.first)


ARCHITECTURES: Sequence[type[Architecture]] = (Causal, EncoderDecoder)
"""All kinds; the first that fits is taken."""


def architecture_of(config: Any) -> type[Architecture]:
    """The kind of the model with this configuration."""
    return next(kind for kind in ARCHITECTURES if kind.fits(config))


class _CausalContinuation(Continuation):
    def __init__(self, model: Any, prompts: Sequence[Tokens], pad: int) -> None:
        width = max(len(prompt) for prompt in prompts)
        device = model.device
        self._ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=device)
        self._mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        self._positions = (self._mask.cumsum(dim=1) - 1).clamp(min=0)
        self._cached = _Cached(model)

    def next(self, tokens: torch.Tensor | None = None) -> torch.Tensor:
        if tokens is not None:
            self._ids, self._positions = tokens[:, None], self._positions[:, -1:] + 1
            self._mask = torch.cat([self._mask, torch.ones_like(self._ids)], dim=1)
        # Positions aren't counted from the first token where there is padding, and of a prompt's logits only the last
        # are asked for; some models know neither and get along without.
        known = self._cached.known({"position_ids": self._positions, "logits_to_keep": 1})
        return self._cached.logits(input_ids=self._ids, attention_mask=self._mask, **known)


class _DecoderContinuation(Continuation):
    def __init__(self, model: Any, prompts: Sequence[Tokens], start: int) -> None:
        ids, self._mask = (tensor.to(model.device) for tensor in _padded(prompts))
        self._encoded = model.get_encoder()(input_ids=ids, attention_mask=self._mask)
        self._start = torch.full_like(ids[:, 0], start)
        self._cached = _Cached(model)

    def next(self, tokens: torch.Tensor | None = None) -> torch.Tensor:
        tokens = self._start if tokens is None else tokens
        return self._cached.logits(
            encoder_outputs=self._encoded, attention_mask=self._mask, decoder_input_ids=tokens[:, None]
        )


class _Cached:
    """A model that is called again and again, and the keys and values that it keeps."""

    def __init__(self, model: Any) -> None:
        self._model, self._cache = model, None
        self._parameters = inspect.signature(model.forward).parameters
        # The older name is on its way out of transformers.
        self._name = "cache" if "cache" in self._parameters else "past_key_values"

    def known(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the options that the model names."""
        return {name: value for name, value in options.items() if name in self._parameters}

    def logits(self, **inputs: Any) -> torch.Tensor:
        """Of the last position, of shape ``(rows, vocabulary)``."""
        output = self._model(**inputs, **{self._name: self._cache}, use_cache=True)
        self._cache = output[self._name]
        logits: torch.Tensor = output.logits[:, -1]
        return logits


def _padded(rows: Sequence[Tokens]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, right-padded, and their mask, both int64 of shape ``(rows, longest)``; at least one position."""
    width = max(1, *(len(row) for row in rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row, dtype=torch.long)
        mask[index, : len(row)] = 1
    return ids, mask
