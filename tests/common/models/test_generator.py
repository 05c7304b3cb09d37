"""The generator: losses of documents are exact sums over a large vocabulary."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.models.generator import Batch, document_losses

VOCABULARY = 50_000
BATCH = Batch([[1], [2, 3]], [list(range(10, 18)), list(range(20, 26))])


def test_a_tokens_loss_loses_no_digits_to_the_size_of_the_vocabulary() -> None:
    """Its gradient with respect to the logits sums to zero over the vocabulary."""
    torch.manual_seed(0)
    logits = (5 * torch.randn(*BATCH.input_ids.shape, VOCABULARY)).requires_grad_(True)
    document_losses(lambda **_: SimpleNamespace(logits=logits), BATCH).sum().backward()  # type: ignore[arg-type]
    assert logits.grad is not None
    assert logits.grad.double().sum(-1).abs().max() < 3e-6


def test_a_strided_vocabulary_would_lose_them() -> None:
    """Twin: cross entropy with the classes in the middle, as its documentation shows it."""
    torch.manual_seed(0)
    logits = (5 * torch.randn(*BATCH.input_ids.shape, VOCABULARY)).requires_grad_(True)
    targets = BATCH.labels[:, 1:]
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), targets, reduction="none")
    (losses.sum(1) / (targets >= 0).sum(1)).sum().backward()
    assert logits.grad is not None
    assert logits.grad.double().sum(-1).abs().max() > 3e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_equal_a_reference_in_double_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(*BATCH.input_ids.shape, VOCABULARY).to(dtype)
    found = document_losses(lambda **_: SimpleNamespace(logits=logits), BATCH)  # type: ignore[arg-type]
    log_p = torch.log_softmax(logits.double(), dim=-1)[:, :-1]
    targets = BATCH.labels[:, 1:]
    picked = log_p.gather(2, targets.clamp(min=0)[..., None])[..., 0] * (targets >= 0)
    expected = -picked.sum(1) / (targets >= 0).sum(1)
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-6)
