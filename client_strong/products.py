"""Matrix products with frozen weights, by the faster of the two libraries that torch comes with.

On a CPU torch gives float32 products to its BLAS. Where that is Intel's and the processor isn't, oneDNN, which torch
has too, is up to half as fast again at the same precision. Which is faster is measured, once in a process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch

_SHAPE = (512, 576, 1024)
"""Of the measured product: rows, inputs, outputs; large enough to be bound by arithmetic."""


def product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``rows @ weight.T + bias``, of shape ``(rows, out)``. Not differentiable.

    Parameters
    ----------
    rows
        Of shape ``(rows, in)``.
    weight
        Of shape ``(out, in)``, contiguous or the transpose of something that is.
    """
    if rows.dtype == torch.float32 and rows.device.type == "cpu" and onednn_is_faster():
        return _by_onednn(rows, weight, bias)
    return torch.nn.functional.linear(rows, weight, bias)


@cache
def onednn_is_faster() -> bool:
    """Whether oneDNN multiplies float32 matrices faster on this machine, and just as exactly."""
    rows, inputs, outputs = _SHAPE
    source = torch.Generator().manual_seed(0)
    a, b = torch.randn(rows, inputs, generator=source), torch.randn(outputs, inputs, generator=source)
    try:
        found = _by_onednn(a, b, None)
    except (AttributeError, RuntimeError, NotImplementedError):
        # Another build of torch, or another processor.
        return False
    exact = a.double() @ b.double().t()
    if float((found - exact).abs().max() / exact.abs().max()) > 1e-6:
        # It may be set to compute with fewer bits.
        return False
    return _seconds(lambda: _by_onednn(a, b, None)) < _seconds(lambda: torch.nn.functional.linear(a, b))


def _by_onednn(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return result


def _seconds(work: Callable[[], object]) -> float:
    """The best of five."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best
