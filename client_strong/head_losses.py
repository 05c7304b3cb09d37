"""Documents' losses without the logits of a whole batch, which are far larger than everything else in a step.

losses = lean(document_losses, generator)
losses(generator.model, batch)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from client_strong.products import product
from client_strong.replaced import replaced
from common.models.generator import Batch, Generator, document_losses

Losses = Callable[[torch.nn.Module, Batch], torch.Tensor]

_HEAD_TOKENS = 128
"""Tokens whose logits exist at once: 25 MB for a vocabulary of 49,152, and still a product of full speed."""


def lean(losses: Losses, generator: Generator) -> Losses:
    """`document_losses` without all logits at once, if that is what is asked for and the model allows it."""
    if losses is not document_losses:
        return losses
    head = generator.model.get_base_model().get_output_embeddings()
    if type(head) is not torch.nn.Linear or head.weight.requires_grad or not _ends_in(head, generator):
        return losses
    return partial(_lean_losses, head)


def _ends_in(head: Any, generator: Generator) -> bool:
    """Whether the model's logits are its head's output to the last bit: some models scale or cap them afterwards."""
    ids = [token % head.out_features for token in range(4)]
    batch = generator.batch([ids[:2]], [ids])
    with torch.no_grad():
        logits = generator.model(**batch.inputs, use_cache=False).logits
        hidden = _hidden_states(head, generator.model, batch)
        if hidden is None or hidden.dtype != head.weight.dtype:
            return False
        if hidden.shape != (*batch.targets.shape, head.in_features):
            return False
        return bool(torch.equal(head(hidden), logits))


def _lean_losses(head: Any, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    hidden = _hidden_states(head, model, batch)
    return _HeadLosses.apply(hidden, head.weight, head.bias, batch.targets)


class _Reached(Exception):
    """The model has come to its head."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


def _hidden_states(head: Any, model: torch.nn.Module, batch: Batch) -> torch.Tensor | None:
    """What the model gives its head, of shape ``(documents, positions, in_features)``; None if it has another way.

    The model isn't let on from there: what it does with logits, such as adding a bias of the vocabulary's size, it
    can't do with these.
    """

    def stop(hidden: torch.Tensor) -> torch.Tensor:
        raise _Reached(hidden)

    with replaced(head, forward=stop):
        try:
            model(**batch.inputs, use_cache=False)
        except _Reached as reached:
            return reached.hidden
    return None


class _HeadLosses(torch.autograd.Function):  # type: ignore[misc]
    """Documents' mean cross entropy of a frozen head's output, a few tokens at a time.

    As the head is frozen and a token's loss doesn't depend on others, the gradient of the hidden states can be taken
    at once, while a token's logits are there.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
    ) -> torch.Tensor:
        document, position = torch.nonzero(targets >= 0, as_tuple=True)
        target = targets[document, position]
        counts = torch.bincount(document, minlength=targets.shape[0]).clamp(min=1)
        shares = (1 / counts.float())[document]
        losses = torch.zeros(targets.shape[0], device=hidden.device)
        to_hidden = torch.zeros_like(hidden)
        for start in range(0, target.numel(), _HEAD_TOKENS):
            chunk = slice(start, start + _HEAD_TOKENS)
            where, picked, share = (document[chunk], position[chunk]), target[chunk, None], shares[chunk]
            logits = product(hidden[where], weight, bias).float()
            log_p = torch.log_softmax(logits, dim=1)
            losses.index_add_(0, where[0], -log_p.gather(1, picked)[:, 0] * share)
            to_logits = log_p.exp_().scatter_add_(1, picked, torch.full_like(log_p[:, :1], -1)).mul_(share[:, None])
            to_hidden[where] = product(to_logits.to(weight.dtype), weight.t())
        ctx.save_for_backward(to_hidden)
        return losses

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (to_hidden,) = ctx.saved_tensors
        return to_hidden * g[:, None, None].to(to_hidden.dtype), None, None, None
