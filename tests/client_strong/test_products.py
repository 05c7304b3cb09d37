"""Products with frozen weights: the same numbers whichever library computes them, and torch's own where it must."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from client_strong import products
from client_strong.products import onednn_is_faster, product

SHAPES = [(1, 8, 3), (37, 96, 64), (512, 576, 1536)]


@pytest.fixture
def measured_anew() -> Iterator[None]:
    onednn_is_faster.cache_clear()
    yield
    onednn_is_faster.cache_clear()


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


@pytest.mark.parametrize("faster", [True, False], ids=["onednn", "torch"])
@pytest.mark.parametrize("transposed", [False, True], ids=["weight", "transposed"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_the_exact_one(
    shape: tuple[int, int, int], with_bias: bool, transposed: bool, faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if faster and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(products, "onednn_is_faster", lambda: faster)
    rows, inputs, outputs = shape
    a, b = _random(rows, inputs), _random(outputs, inputs)
    bias = _random(outputs) if with_bias else None
    weight = b.t().contiguous().t() if transposed else b

    found = product(a, weight, bias)

    exact = a.double() @ b.double().t() + (0 if bias is None else bias.double())
    assert found.dtype == torch.float32
    assert float((found - exact).abs().max() / exact.abs().max()) < 2e-6


def test_another_number_format_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "onednn_is_faster", lambda: pytest.fail("asked for float32 only"))
    a, b = _random(5, 8).bfloat16(), _random(3, 8).bfloat16()
    assert torch.equal(product(a, b), torch.nn.functional.linear(a, b))


def _absent(*_: object) -> torch.Tensor:
    raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")


def _of_fewer_bits(rows: torch.Tensor, weight: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
    return (rows.bfloat16() @ weight.bfloat16().t()).float()


@pytest.mark.parametrize("broken", [_absent, _of_fewer_bits])
def test_a_library_that_is_absent_or_less_exact_is_never_used(
    broken: object, measured_anew: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_by_onednn", broken)
    monkeypatch.setattr(products, "_seconds", lambda work: pytest.fail("there is nothing to measure"))
    assert not onednn_is_faster()


@pytest.mark.parametrize(("onednn", "own", "chosen"), [(1.0, 2.0, True), (2.0, 1.0, False)])
def test_the_faster_library_is_used(
    onednn: float, own: float, chosen: bool, measured_anew: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([onednn, own])
    monkeypatch.setattr(products, "_by_onednn", lambda rows, weight, bias: rows @ weight.t())
    monkeypatch.setattr(products, "_seconds", lambda work: next(times))
    assert onednn_is_faster() is chosen
