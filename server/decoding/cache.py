"""Keys and values of texts that grow in slots, in place of the library's own cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

_GROWTH = 32
"""Positions are added by so many: most texts end long before the longest that is allowed."""


@dataclass
class Place:
    """What all layers of a cache know: where the slots in use write, and how many positions they read."""

    rows: torch.Tensor
    positions: torch.Tensor
    width: int = 0


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc,unused-ignore]
    """Keys and values of one layer, of shape ``(slots, heads, positions, width)``."""

    def __init__(self, place: Place, slots: int, like: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__()
        self._place = place
        self._keys, self._values = (tensor.new_zeros(slots, tensor.shape[1], 0, tensor.shape[3]) for tensor in like)
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """It is there from the start."""

    def reserve(self, positions: int) -> None:
        """Have room for so many positions."""
        missing = positions - self._keys.shape[2]
        if missing > 0:
            missing += -positions % _GROWTH
            self._keys = torch.nn.functional.pad(self._keys, (0, 0, 0, missing))
            self._values = torch.nn.functional.pad(self._values, (0, 0, 0, missing))

    def put(self, slot: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Begin with those of a prompt, of shape ``(1, heads, positions, width)``."""
        self.reserve(keys.shape[2])
        self._keys[slot, :, : keys.shape[2]], self._values[slot, :, : keys.shape[2]] = keys[0], values[0]

    def move(self, source: int, target: int) -> None:
        """Copy a slot's."""
        self._keys[target], self._values[target] = self._keys[source], self._values[source]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Write one token's of every slot in use, and give all that may be read."""
        place = self._place
        self._keys[place.rows, :, place.positions] = key_states[:, :, 0].to(self._keys.dtype)
        self._values[place.rows, :, place.positions] = value_states[:, :, 0].to(self._values.dtype)
        return self.read(place.width)

    def read(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of the slots in use."""
        used = len(self._place.rows)
        return self._keys[:used, :, :width], self._values[:used, :, :width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset; masks are given to the model, so nobody should ask."""
        return self._place.width, 0

    def get_seq_length(self) -> Any:
        """How far each slot is, of shape ``(slots in use, 1)``: a model's own arithmetic then is by slot."""
        return self._place.positions[:, None]

    def get_max_length(self) -> int:
        """None."""
        return -1


class SlotCache(Cache):  # type: ignore[misc,unused-ignore]
    """All layers, and what the prompts left in them."""

    def __init__(self, place: Place, slots: int, sample: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__(layers=[_SlotLayer(place, slots, like) for like in sample])

    def put(self, slot: int, kept: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Begin a slot with what a prompt left, by layer."""
        for layer, (keys, values) in zip(self.layers, kept, strict=True):
            layer.put(slot, keys, values)

    def move(self, source: int, target: int) -> None:
        """Copy a slot's."""
        for layer in self.layers:
            layer.move(source, target)

    def reserve(self, positions: int) -> None:
        """Have room for so many positions."""
        for layer in self.layers:
            layer.reserve(positions)
