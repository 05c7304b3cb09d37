"""Gradients of single documents at no more time and memory than training without privacy.

A LoRA layer computes ``y = W x + s B A x`` with W frozen. One document's gradients are ``s g' (A x)`` for B and
``s (g B)' x`` for A, summed over its tokens: two thin products from what the backward pass holds anyway, the layer's
input x and the gradient g of its output. So nothing is computed per document but these. Meanwhile the rest of the step
is made cheaper than peft makes it: W and ``s B A`` are one matrix, no gradient summed over documents is formed, and
the logits of a batch, which are far larger than everything else, are never held at once.

Padding needs no care here: no loss depends on the output at a padding token, so its g is zero.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from client_strong.gradients import Gradient, PerSampleGradients, Slots
from client_strong.head_losses import Losses, lean
from client_strong.products import product
from client_strong.replaced import replaced
from common.errors import ModelError
from common.models.generator import Batch, Generator, document_losses

_MERGED_DTYPES = (torch.float32, torch.float64)
"""Below these, ``W + s B A`` would round to W: an adapter that has hardly left zero would not be seen."""


class FusedGradients(PerSampleGradients):
    """By products of activations and output gradients, in place of peft's forward and backward pass.

    Parameters
    ----------
    generator
        Its adapter must be plain LoRA on linear layers; everything else that is trained is refused.
    losses
        Loss of each document, shape ``(documents,)``. `document_losses` is computed without holding all logits, where
        the model's logits are its head's output and nothing more.
    checkpointing
        Whether to compute activations twice instead of keeping them: a third more time, a fraction of the memory.

    Raises
    ------
    ModelError
        If a trained parameter or an adapted layer is none that this class knows, or the model has dropout.
    """

    def __init__(self, generator: Generator, losses: Losses = document_losses, *, checkpointing: bool = False) -> None:
        self._generator, self._model = generator, generator.model
        self._layers = _adapted_layers(self._model)
        # Walking through the modules takes milliseconds; which of these are trained is asked at every call.
        self._parameters = sorted(self._model.named_parameters())
        self._slots()
        _check_dropout(self._model)
        self._losses = lean(losses, generator)
        self._checkpointed = _checkpointed_modules(self._model) if checkpointing else []

    @property
    def dimension(self) -> int:
        """d, number of trained parameters."""
        return self._slots().dimension

    def __call__(self, batch: Batch) -> Iterator[Gradient]:
        """One float32 gradient of shape ``(dimension,)`` per document; private, not clipped."""
        batch = batch.to(self._generator.device)
        samples = _Samples(self._slots(), batch.documents, batch.positions, self._generator.device)
        with ExitStack() as changes:
            changes.callback(self._clear)
            changes.callback(self._model.train, self._model.training)
            self._model.train()
            for layer in self._layers:
                changes.enter_context(replaced(layer.module, forward=partial(_fused_forward, layer, samples)))
            for module in self._checkpointed:
                recompute = partial(checkpoint, use_reentrant=False)
                changes.enter_context(
                    replaced(module, gradient_checkpointing=True, _gradient_checkpointing_func=recompute)
                )
            self._losses(self._model, batch).sum().backward()
        yield from samples.gradients()

    def _slots(self) -> Slots:
        trained = {name: parameter for name, parameter in self._parameters if parameter.requires_grad}
        _check_trained(trained, self._layers)
        return Slots.of(trained)

    def _clear(self) -> None:
        # No plain gradient is formed, unless the losses use a parameter past its layer: that one would be exact.
        for parameter in self._model.parameters():
            parameter.grad = None


# Adapted layers


@dataclass(frozen=True)
class _Layer:
    """A LoRA layer around a frozen linear one.

    Attributes
    ----------
    transposed
        Whether ``weight`` is of shape ``(in, out)``, as in transformers' Conv1D, and not ``(out, in)``.
    """

    name: str
    module: Any
    weight: torch.Tensor
    bias: torch.Tensor | None
    a: torch.nn.Parameter
    b: torch.nn.Parameter
    scaling: float
    transposed: bool

    @property
    def merges(self) -> bool:
        return self.weight.dtype in _MERGED_DTYPES

    def matrix(self) -> torch.Tensor:
        """The layer's weight, of shape ``(out, in)``; with the adapter if the layer merges.

        Computed anew in the backward pass: it costs a hundredth of a product, and keeping it would cost a copy of the
        model.
        """
        if not self.merges:
            return self.weight.t() if self.transposed else self.weight
        a, b = self.a.detach().to(self.weight.dtype), self.b.detach().to(self.weight.dtype)
        if self.transposed:
            return torch.addmm(self.weight, a.t(), b.t(), alpha=self.scaling).t()
        return torch.addmm(self.weight, b, a, alpha=self.scaling)


def _adapted_layers(model: Any) -> list[_Layer]:
    return [_layer(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


def _layer(name: str, module: Any) -> _Layer:
    """Everything that a layer's forward depends on, or a refusal: what isn't read here would be left out silently."""
    base = module.base_layer
    if type(module) is not LoraLinear or type(base) not in (torch.nn.Linear, Conv1D):
        raise ModelError(
            f"training: layer {name!r} is a {type(module).__name__} around a {type(base).__name__}; fused gradients "
            "know LoRA around Linear and Conv1D; choose other target_modules"
        )
    adapters = [adapter for adapter in module.active_adapters if adapter in module.lora_A]
    if len(adapters) != 1 or module.disable_adapters or module.merged:
        raise ModelError(f"training: layer {name!r} needs exactly one active, unmerged adapter; it has {adapters!r}")
    (adapter,) = adapters
    if adapter in module.lora_variant or module.lora_B[adapter].bias is not None:
        raise ModelError(f"training: layer {name!r} has a LoRA variant or an adapter with bias; plain LoRA is accepted")
    return _Layer(
        name=name,
        module=module,
        weight=base.weight,
        bias=base.bias,
        a=module.lora_A[adapter].weight,
        b=module.lora_B[adapter].weight,
        scaling=float(module.scaling[adapter]),
        transposed=isinstance(base, Conv1D),
    )


def _check_trained(trained: Mapping[str, torch.nn.Parameter], layers: Sequence[_Layer]) -> None:
    known = {id(parameter) for layer in layers for parameter in (layer.a, layer.b)}
    for name, parameter in trained.items():
        if id(parameter) not in known:
            where = " (one of modules_to_save)" if "modules_to_save" in name else ""
            raise ModelError(
                f"training: {name!r}{where} is trained but is no A or B of a LoRA layer; its gradient for a single "
                "document isn't known, so this site refuses to train"
            )


def _check_dropout(model: Any) -> None:
    for name, module in model.named_modules():
        # Some modules hand a number of their own to a function, or leave out a layer at times.
        shares = {key: value for key, value in vars(module).items() if "drop" in key and isinstance(value, float)}
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            shares["p"] = module.p
        if share := max(shares.values(), default=0):
            raise ModelError(
                f"training: {name!r} has a dropout of {share}; 0 is accepted, as dropout makes a document's gradient "
                "random"
            )


# One call


@dataclass(repr=False)
class _Samples:
    """Gradients of one batch as they grow during its backward pass. Private.

    Attributes
    ----------
    positions
        How many tokens of a document a layer may see: those of its prompt, its text or both.
    rows
        float32 of shape ``(documents, dimension)``: documents that no layer reaches stay zero.
    """

    slots: Slots
    documents: int
    positions: Collection[int]
    device: torch.device
    rows: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape = (self.documents, self.slots.dimension)
        if self.device.type == "cpu":
            # numpy asks for zero pages, which take up memory when they are written: in the backward pass, while
            # activations go.
            self.rows = torch.from_numpy(np.zeros(shape, dtype=np.float32))
        else:
            self.rows = torch.zeros(shape, device=self.device)

    def gradients(self) -> Iterator[Gradient]:
        """One document's after the other; on the CPU views of `rows`."""
        for row in self.rows:
            yield row.cpu().numpy()

    def by_document(self, rows: torch.Tensor, layer: _Layer) -> torch.Tensor:
        """View a layer's input or output as ``(documents, tokens, features)``.

        Raises
        ------
        ModelError
            If it can't be told which row is whose.
        """
        if rows.dim() == 3 and rows.shape[0] == self.documents:
            return rows
        if rows.dim() == 2 and rows.shape[0] in {self.documents * tokens for tokens in (1, *self.positions)}:
            return rows.reshape(self.documents, -1, rows.shape[-1])
        raise ModelError(
            f"training: layer {layer.name!r} has an input of shape {tuple(rows.shape)} in a batch of {self.documents} "
            f"documents of {' and '.join(map(str, sorted(self.positions)))} tokens; (documents, tokens, features) is "
            "accepted, flattened or not"
        )

    def add(self, parameter: torch.nn.Parameter, left: torch.Tensor, right: torch.Tensor, scaling: float) -> None:
        """Add ``scaling * left[i]' right[i]`` to document i's gradient of ``parameter``."""
        part = self.slots.by_parameter[id(parameter)]
        target = self.rows[:, part].view(self.documents, *parameter.shape)
        if left.dtype == target.dtype:
            target.baddbmm_(left.transpose(1, 2), right, alpha=scaling)
        else:
            target.add_(torch.bmm(left.transpose(1, 2), right), alpha=scaling)


def _fused_forward(layer: _Layer, samples: _Samples, x: torch.Tensor) -> torch.Tensor:
    # Refused before anything is computed with it.
    samples.by_document(x, layer)
    # A and B are handed over so that autograd comes back to a layer whose input has no gradient.
    return _FusedLora.apply(x, layer.a, layer.b, layer, samples)


class _FusedLora(torch.autograd.Function):  # type: ignore[misc]
    """``y = W x + s B A x`` whose backward puts documents' gradients of A and B aside and gives autograd none."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, layer: _Layer, samples: _Samples
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y, inner = product(rows, layer.matrix(), layer.bias), None
        if not layer.merges:
            inner = product(rows, a.to(x.dtype))
            y.addmm_(inner, (layer.scaling * b).to(x.dtype).t())
        ctx.save_for_backward(x if a.requires_grad or b.requires_grad else None, inner)
        ctx.layer, ctx.samples = layer, samples
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None, None]:
        x, inner = ctx.saved_tensors
        layer, samples = ctx.layer, ctx.samples
        needs_x, needs_a, needs_b, *_ = ctx.needs_input_grad
        rows = g.reshape(-1, g.shape[-1])
        outer: Any = None
        if needs_a or (needs_x and not layer.merges):
            outer = product(rows, layer.b.detach().to(g.dtype).t())
        if needs_b:
            if inner is None:
                inner = product(x.reshape(-1, x.shape[-1]), layer.a.detach().to(x.dtype))
            by_document = samples.by_document(g, layer)
            samples.add(layer.b, by_document, inner.view(*by_document.shape[:2], -1), layer.scaling)
        if needs_a:
            by_document = samples.by_document(x, layer)
            samples.add(layer.a, outer.view(*by_document.shape[:2], -1), by_document, layer.scaling)
        if not needs_x:
            return None, None, None, None, None
        to_x = product(rows, layer.matrix().t())
        if not layer.merges:
            to_x.addmm_(outer, layer.a.detach().to(g.dtype), alpha=layer.scaling)
        return to_x.view(*g.shape[:-1], -1), None, None, None, None


# The model's own switches


def _checkpointed_modules(model: Any) -> list[Any]:
    modules = [m for m in model.get_base_model().modules() if hasattr(m, "gradient_checkpointing")]
    if not modules:
        raise ModelError("training: the model has no layers that can be checkpointed; train without checkpointing")
    return modules
