"""Weights laid out for the processor once, instead of for every product.

A model that generates multiplies a few rows with every weight, over and over. oneDNN, which torch comes with, reads a
weight that is laid out in its own blocks half as fast again. The layout is torch's internal affair, so it is tried out
first: where the op is missing, wrong or slower, models stay as they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
_SHAPE = (32, 576, 1536)
"""Of the product that is tried: rows, inputs, outputs; of a small model's layer."""


class PackedLinear(torch.nn.Module):  # type: ignore[misc]
    """A linear layer for inference on a CPU. Holds no parameters.

    Parameters
    ----------
    weight
        Of shape ``(out, in)``.
    bias
        Of shape ``(out,)``, or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
        self._bias = None if bias is None else bias.detach()
        # Some models ask a layer for its weight's number format.
        self.weight = weight.new_empty(0)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Of shape ``(..., in)`` -> ``(..., out)``."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
        return result


def pack(model: Any) -> None:
    """Pack all linear layers of a model in place, if that is faster where it is. It can't be saved or trained then."""
    weight = model.get_input_embeddings().weight
    if weight.device.type != "cpu" or weight.dtype not in _TOLERANCE or not packing_is_faster(weight.dtype):
        return
    for name, module in list(model.named_modules()):
        matrix = _matrix_of(module)
        if matrix is not None:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, PackedLinear(matrix, module.bias))


@cache
def packing_is_faster(dtype: torch.dtype) -> bool:
    """Whether a packed product is right and faster on this machine; measured, once in a process."""
    rows, inputs, outputs = _SHAPE
    source = torch.Generator().manual_seed(0)
    left = torch.randn(rows, inputs, generator=source).to(dtype)
    right = torch.randn(outputs, inputs, generator=source).to(dtype)
    try:
        packed = PackedLinear(right, None)
        exact = left.double() @ right.double().t()
        error = float((packed(left).double() - exact).abs().max() / exact.abs().max())
    except (AttributeError, RuntimeError, NotImplementedError):
        # Another build of torch, or another processor.
        return False
    plain = _seconds(lambda: torch.nn.functional.linear(left, right))
    return error < _TOLERANCE[dtype] and _seconds(lambda: packed(left)) < plain


def _matrix_of(module: torch.nn.Module) -> torch.Tensor | None:
    """The weight of a plain linear layer, ``(out, in)``; GPT-2 keeps it the other way round."""
    if type(module) is torch.nn.Linear:
        weight: torch.Tensor = module.weight
        return weight
    return module.weight.t() if type(module) is Conv1D else None


def _seconds(work: Callable[[], object]) -> float:
    """The best of ten."""
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best
