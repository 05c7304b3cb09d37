"""Slots of the library's models.

A slot keeps its text's keys and values in a place of its own, by position, so that a new text can begin in it while the
others go on. What a prompt leaves there is computed once and copied. The model runs as the library wrote it; only its
cache, its masks and its positions are ours.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from common.models.architectures import Tokens
from server.decoding import attention
from server.decoding.cache import Place, SlotCache
from server.decoding.slots import Slots, UnsuitableModelError

PROMPTS_KEPT = 64
"""Prompts whose keys and values are kept for the next text; texts are asked for code by code."""

_WINDOWED, _FULL = "sliding_attention", "full_attention"


class ModelSlots(Slots):
    """What both kinds share: positions, first tokens, and prompts that are kept.

    Parameters
    ----------
    model
        Whose linear layers and attention may be ours already.
    slots
        How many.
    """

    def __init__(self, model: Any, slots: int) -> None:
        self._model, self._slots = model, slots
        self._device = model.device
        in_float32 = self._device.type == "cpu" and model.config._attn_implementation == attention.NAME
        self._dtype = torch.float32 if in_float32 else model.dtype
        self._parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in self._parameters else "past_key_values"
        self._positions = torch.zeros(slots, dtype=torch.long, device=self._device)
        self._all = torch.arange(slots, device=self._device)
        self._first = torch.full((slots,), -1, dtype=torch.long, device=self._device)
        self._place = Place(self._all, self._positions)
        self._kept: OrderedDict[tuple[int, ...], Any] = OrderedDict()

    def begin(self, prompts: Mapping[int, Tokens]) -> None:
        """What is known of a prompt is copied, else it is read once."""
        for slot, prompt in prompts.items():
            known = tuple(prompt)
            if known not in self._kept:
                self._kept[known] = self._read(prompt)
                if len(self._kept) > PROMPTS_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(known)
            self._positions[slot], self._first[slot] = self._put(slot, self._kept[known])

    def move(self, source: int, target: int) -> None:
        """With everything that belongs to it."""
        self._positions[target], self._first[target] = self._positions[source], self._first[source]

    def rest(self, slots: Sequence[int]) -> None:
        """They stay where every model has a position."""
        if slots:
            self._positions[list(slots)] = 0

    def next(self, tokens: torch.Tensor) -> torch.Tensor:
        """One step of the model, for all slots in use."""
        used = len(tokens)
        first = self._first[:used]
        tokens = torch.where(first >= 0, first, tokens)
        first.fill_(-1)
        place = self._place
        place.rows, place.positions = self._all[:used], self._positions[:used]
        place.width = int(place.positions.max()) + 1
        self._reserve(place.width)
        logits = self._step(tokens[:, None])
        self._positions[:used] += 1
        return logits

    def _call(self, cache: Any, **inputs: Any) -> torch.Tensor:
        output = self._model(**inputs, **{self._cache_name: cache}, use_cache=True)
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _mask(self, allowed: torch.Tensor) -> torch.Tensor:
        """What is added to scores, of shape ``(slots in use, 1, 1, positions)``."""
        mask = torch.zeros(allowed.shape, dtype=torch.float32, device=self._device)
        return mask.masked_fill_(~allowed, float("-inf"))[:, None, None]

    def _contents(self, cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of a filled cache of the library, by layer."""
        if any(type(layer) is not DynamicLayer or layer.keys is None for layer in cache.layers):
            raise UnsuitableModelError("generation: the model keeps something else than keys and values by position")
        return [(layer.keys.to(self._dtype), layer.values.to(self._dtype)) for layer in cache.layers]

    @abstractmethod
    def _read(self, prompt: Tokens) -> Any:
        """What the model keeps of a prompt."""

    @abstractmethod
    def _put(self, slot: int, kept: Any) -> tuple[int, int]:
        """Copy that into a slot; its first position and its first token."""

    @abstractmethod
    def _reserve(self, positions: int) -> None: ...

    @abstractmethod
    def _step(self, tokens: torch.Tensor) -> torch.Tensor: ...


class CausalSlots(ModelSlots):
    """Slots of a model that goes on with its prompt. Its last token is the first that a slot reads."""

    def __init__(self, model: Any, slots: int) -> None:
        super().__init__(model, slots)
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ())
        if kinds - {_WINDOWED, _FULL}:
            raise UnsuitableModelError(f"generation: the model has layers of the kinds {sorted(kinds)}")
        self._kinds = kinds
        self._window: int | None = getattr(config, "sliding_window", None)
        self._cache: SlotCache | None = None

    def move(self, source: int, target: int) -> None:
        """With its keys and values."""
        super().move(source, target)
        if self._cache is not None:
            self._cache.move(source, target)

    def _read(self, prompt: Tokens) -> Any:
        # Not one of the model's own kind, which forgets what is outside a window.
        filled = DynamicCache()
        ids = torch.tensor([list(prompt)], device=self._device)
        self._call(filled, input_ids=ids, **self._known({"logits_to_keep": 1}))
        kept = [(keys[:, :, :-1], values[:, :, :-1]) for keys, values in self._contents(filled)]
        return list(prompt), kept

    def _put(self, slot: int, kept: Any) -> tuple[int, int]:
        prompt, states = kept
        if self._cache is None:
            self._cache = SlotCache(self._place, self._slots, states)
        self._cache.put(slot, states)
        return len(prompt) - 1, prompt[-1]

    def _reserve(self, positions: int) -> None:
        if self._cache is not None:
            self._cache.reserve(positions)

    def _step(self, tokens: torch.Tensor) -> torch.Tensor:
        known = self._known({"position_ids": self._place.positions[:, None], "logits_to_keep": 1})
        return self._call(self._cache, input_ids=tokens, attention_mask=self._masks(), **known)

    def _masks(self) -> Any:
        columns, here = torch.arange(self._place.width, device=self._device), self._place.positions[:, None]
        full = columns <= here
        if self._window is None:
            return self._mask(full)
        windowed = full & (columns > here - self._window)
        if _WINDOWED in self._kinds:
            return {_FULL: self._mask(full), _WINDOWED: self._mask(windowed)}
        return self._mask(full if self._kinds else windowed)

    def _known(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in options.items() if name in self._parameters}


class DecoderSlots(ModelSlots):
    """Slots of an encoder-decoder's decoder. The encoder reads a prompt once; every slot looks at its own."""

    def __init__(self, model: Any, slots: int, start: int, longest: int) -> None:
        super().__init__(model, slots)
        self._start, self._longest = start, longest
        self._own: SlotCache | None = None
        self._crossed: SlotCache | None = None
        self._both: Any = None
        self._lengths = torch.zeros(slots, dtype=torch.long, device=self._device)
        _count_positions_by_slot(model.get_decoder())

    def move(self, source: int, target: int) -> None:
        """With what it looks at."""
        super().move(source, target)
        self._lengths[target] = self._lengths[source]
        for cache in (self._own, self._crossed):
            if cache is not None:
                cache.move(source, target)

    def _read(self, prompt: Tokens) -> Any:
        ids = torch.tensor([list(prompt)], device=self._device)
        encoded = self._model.get_encoder()(input_ids=ids, attention_mask=torch.ones_like(ids))
        filled = EncoderDecoderCache(DynamicCache(), DynamicCache())
        first = torch.full_like(ids[:, :1], self._start)
        self._call(filled, encoder_outputs=encoded, attention_mask=torch.ones_like(ids), decoder_input_ids=first)
        return self._contents(filled.self_attention_cache), self._contents(filled.cross_attention_cache)

    def _put(self, slot: int, kept: Any) -> tuple[int, int]:
        own, crossed = kept
        if self._own is None or self._crossed is None:
            self._own = SlotCache(self._place, self._slots, own)
            self._crossed = SlotCache(self._place, self._slots, crossed)
            self._crossed.reserve(self._longest)
            self._both = EncoderDecoderCache(DynamicCache(), DynamicCache())
            self._both.self_attention_cache, self._both.cross_attention_cache = self._own, self._crossed
            self._both.is_updated = dict.fromkeys(range(len(crossed)), True)
        self._crossed.put(slot, crossed)
        self._lengths[slot] = crossed[0][0].shape[2]
        return 0, self._start

    def _reserve(self, positions: int) -> None:
        if self._own is not None:
            self._own.reserve(positions)

    def _step(self, tokens: torch.Tensor) -> torch.Tensor:
        used, width = len(tokens), int(self._lengths[: len(tokens)].max())
        if self._crossed is not None:
            for layer in self._crossed.layers:
                # A model takes these as they are, where it has looked at the prompt before.
                layer.keys, layer.values = layer.read(width)
        seen = torch.arange(width, device=self._device) < self._lengths[:used, None]
        own = torch.arange(self._place.width, device=self._device) <= self._place.positions[:, None]
        # Nothing is read from it but its shape.
        looked_at = torch.zeros(used, width, 1, dtype=self._model.dtype, device=self._device)
        return self._call(
            self._both,
            encoder_outputs=BaseModelOutput(last_hidden_state=looked_at),
            attention_mask=self._mask(seen),
            decoder_input_ids=tokens,
            decoder_attention_mask=self._mask(own),
        )


def _count_positions_by_slot(decoder: Any) -> None:
    """Let a decoder that counts positions for all rows alike count them by slot.

    The cache answers how far each slot is with a column where a model of the library expects a number. Its arithmetic
    goes through with that; what comes out has its axes elsewhere. Learned positions, as BART's, come with one axis more
    in front; a bias by distance, as T5's, with the slots where the tokens should be.
    """
    positions = getattr(decoder, "embed_positions", None)
    if positions is not None:
        positions.register_forward_hook(lambda _module, _inputs, found: found.squeeze(0) if found.dim() == 4 else found)
    for module in decoder.modules():
        if getattr(module, "has_relative_attention_bias", False):
            module.compute_bias = _by_slot(module.compute_bias)


def _by_slot(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def compute_by_slot(*arguments: Any, past_seen_tokens: Any = 0, **options: Any) -> torch.Tensor:
        bias = compute(*arguments, past_seen_tokens=past_seen_tokens, **options)
        return bias.transpose(0, 2) if isinstance(past_seen_tokens, torch.Tensor) else bias

    return compute_by_slot
