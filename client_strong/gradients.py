"""Gradients of single documents, which DP-SGD clips: what computes them, and the reference by Opacus.

    gradients = FusedGradients(generator)          # client_strong.fused
    check_gradients(generator, gradients)          # client_strong.gradient_check
    for gradient in gradients(batch):
        ...

The fused way costs no more than training without privacy; the reference is other people's code.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from opacus.grad_sample.grad_sample_module import GradSampleHooks

from client_strong.head_losses import Losses
from common.errors import ModelError
from common.models.generator import Batch, Generator, document_losses

Gradient = NDArray[np.floating[Any]]


class PerSampleGradients(ABC):
    """Gradients of each document of a batch, with respect to the generator's parameters that are trained at the call.

    Which these are may change from round to round.
    """

    @abstractmethod
    def __init__(
        self, generator: Generator, losses: Losses = document_losses, *, checkpointing: bool = False
    ) -> None: ...

    @property
    @abstractmethod
    def dimension(self) -> int:
        """d, number of trained parameters."""

    @abstractmethod
    def __call__(self, batch: Batch) -> Iterator[Gradient]:
        """Compute one gradient of shape ``(dimension,)`` per document, in the order of ``generator.trained``.

        Private and not clipped. When the first is yielded, nothing exact is left on the model, whatever happened.
        """


@dataclass(frozen=True)
class Slots:
    """Where a parameter's gradient lies in the whole one.

    Attributes
    ----------
    parts, by_parameter
        By a parameter's name, and by its ``id``.
    dimension
        d, length of the whole one.
    """

    parts: Mapping[str, slice]
    by_parameter: Mapping[int, slice]
    dimension: int

    @classmethod
    def of(cls, trained: Mapping[str, torch.nn.Parameter]) -> Slots:
        """Of trained parameters, one after the other."""
        ends = np.cumsum([0, *(p.numel() for p in trained.values())]).tolist()
        parts = {name: slice(*ends[i : i + 2]) for i, name in enumerate(trained)}
        return cls(parts, {id(trained[name]): part for name, part in parts.items()}, ends[-1])


class OpacusGradients(PerSampleGradients):
    """By Opacus hooks. The reference: slower and larger, but other people's code. It can't checkpoint (ModelError)."""

    def __init__(self, generator: Generator, losses: Losses = document_losses, *, checkpointing: bool = False) -> None:
        if checkpointing:
            # A hook would see the forward pass twice.
            raise ModelError("training: 'opacus' gradients can't recompute activations; 'fused' ones can")
        self._generator, self._model = generator, generator.model
        self._losses = losses

    @property
    def dimension(self) -> int:
        """d, number of trained parameters."""
        return sum(p.numel() for p in self._generator.trained.values())

    def __call__(self, batch: Batch) -> Iterator[Gradient]:
        """One float64 gradient of shape ``(dimension,)`` per document; private, not clipped."""
        batch, parameters = batch.to(self._generator.device), list(self._generator.trained.values())
        hooks = GradSampleHooks(self._model, loss_reduction="sum")
        try:
            self._model.train()
            with warnings.catch_warnings():
                # The first adapted layer has inputs without gradients, which is as it should be.
                warnings.filterwarnings("ignore", message="Full backward hook is firing")
                self._losses(self._model, batch).sum().backward()
            samples = [p.grad_sample.detach() for p in parameters]
        finally:
            hooks.remove_hooks()
            self._clear(parameters)
        for index in range(batch.documents):
            yield np.concatenate([s[index].reshape(-1).cpu().numpy() for s in samples]).astype(np.float64)

    def _clear(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        # A plain gradient and the per-sample ones are exact: they may not survive into the next step.
        for parameter in parameters:
            parameter.grad = None
            parameter.grad_sample = None
            # After an exception these stay, a half-summed gradient and how often a layer is still to come.
            vars(parameter).pop("_current_grad_sample", None)
            vars(parameter).pop("_forward_counter", None)
        for module in self._model.modules():
            # So do the documents' activations.
            vars(module).pop("activations", None)
            vars(module).pop("max_batch_len", None)
