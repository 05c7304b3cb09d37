"""Packed layers multiply as the layers they stand for; where that is no gain, models stay as they are."""

from __future__ import annotations

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from server.decoding import packing
from server.decoding.packing import PackedLinear, pack, packing_is_faster


class _Model(torch.nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 96)
        self.layers = torch.nn.Sequential(torch.nn.Linear(96, 64), Conv1D(48, 64), torch.nn.Linear(48, 32, bias=False))
        self.requires_grad_(False).to(dtype)
        self.layers[1].bias.normal_()

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embedding

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layers(rows)


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch has no packed products")
    monkeypatch.setattr(packing, "packing_is_faster", lambda _dtype: True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_layers_say_what_the_layers_said(dtype: torch.dtype, faster: None) -> None:
    model, rows = _Model(dtype), torch.randn(3, 5, 96).to(dtype)
    before = model(rows)
    pack(model)
    assert [type(layer) for layer in model.layers] == [PackedLinear] * 3
    assert torch.allclose(model(rows).float(), before.float(), atol=1e-5 if dtype == torch.float32 else 5e-2)


def test_a_layer_of_another_kind_stays(faster: None) -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(rows)

    model, rows = _Model(), torch.randn(4, 96)
    model.layers[0] = Doubled(96, 64)
    before = model(rows)
    pack(model)
    assert isinstance(model.layers[0], Doubled)
    assert torch.allclose(model(rows), before, atol=1e-5)


def test_a_wrong_product_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: PackedLinear, rows: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*rows.shape[:-1], 1536, dtype=rows.dtype)

    packing_is_faster.cache_clear()
    monkeypatch.setattr(PackedLinear, "forward", wrong)
    try:
        assert not packing_is_faster(torch.float32)
    finally:
        packing_is_faster.cache_clear()
