"""The ways of computing gradients that a site may choose from, and the self-test that each passes before it trains.

A document's gradient with another document's share in it, or with a factor lost, breaks the guarantee and nothing else:
the model learns all the same. So a site compares, at the start of every run, with plain autograd.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from client_strong.fused import FusedGradients
from client_strong.gradients import Gradient, OpacusGradients, PerSampleGradients, Slots
from common.errors import ModelError
from common.models import lora
from common.models.generator import Batch, Generator, document_losses

_TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.2, torch.float16: 0.2}
"""Largest relative deviation in the self-test. In bfloat16, with its 8 bits, the same sums in another order come out 1%
to 6% apart (2 to 30 layers, ranks 1 to 16); the faults that break privacy (another document's share, a lost factor) are
of the gradient's own size."""

SENTENCES = (
    "The staff were kind and explained everything clearly to my mother.",
    "I waited for three hours.",
    "The treatment helped, and the pain went away after a week or two of rest at home.",
)
"""What the self-test runs on: of unequal length, so that padding is there."""

_SMALL_SHARE = 1e-2
"""A parameter's deviation is measured against at least this share of the whole gradient: a gradient that cancels to
nothing (attention over one token) is all rounding."""

GRADIENTS: Mapping[str, type[PerSampleGradients]] = {"fused": FusedGradients, "opacus": OpacusGradients}
"""Implementations by name."""


def check_gradients(
    generator: Generator, gradients: PerSampleGradients, texts: Sequence[Sequence[int]] | None = None
) -> None:
    """Self-test at the start: gradients of a batch are what plain autograd gives for each of its documents alone.

    Of every parameter that any round trains. Meanwhile the adapter holds other values than its own: where B is zero, as
    at first, so is the gradient of A, and a wrong one can't be seen.

    Parameters
    ----------
    texts
        Token ids, at least two in each text; public. `SENTENCES` by default.

    Raises
    ------
    ModelError
        Naming the parameter that deviates most.
    """
    texts = texts or _public_texts(generator)
    cycle = lora.cycle(generator.options.lora)
    with _stand_in(generator):
        for server_round in range(1, cycle + 1):
            if cycle > 1:
                generator.start_round(server_round)
            _check_round(generator, gradients, texts)


def _check_round(generator: Generator, gradients: PerSampleGradients, texts: Sequence[Sequence[int]]) -> None:
    # Prompts are of unequal length too, for models that read them apart from the text.
    cuts = [max(1, len(text) // 3) for text in texts]
    prompts = [text[:cut] for text, cut in zip(texts, cuts, strict=True)]
    texts = [text[cut:] for text, cut in zip(texts, cuts, strict=True)]
    alone = [_plain_gradient(generator, generator.batch([p], [t])) for p, t in zip(prompts, texts, strict=True)]
    if not any(np.any(gradient) for gradient in alone):
        raise ModelError("training: no loss depends on the adapter; its layers aren't part of the model's output")
    together = list(gradients(generator.batch(prompts, texts)))
    if len(together) != len(alone) or any(g.shape != (gradients.dimension,) for g in together):
        raise ModelError(
            f"training: {len(alone)} documents gave {len(together)} gradients of shapes "
            f"{sorted({g.shape for g in together})}; this site refuses to train"
        )
    name, deviation = _largest_deviation(Slots.of(generator.trained), together, alone)
    tolerance = _TOLERANCES[generator.dtype]
    # Written so that a NaN is refused too.
    if not deviation <= tolerance:
        raise ModelError(
            f"training: a document's gradient of {name!r} deviates by {deviation:.2g} (relative) from plain autograd, "
            f"at most {tolerance:g} is accepted; this site refuses to train"
        )


def _public_texts(generator: Generator) -> list[list[int]]:
    # Language, not random tokens: on text that means nothing to it a trained model is so ill-conditioned that the
    # rounding of bfloat16 alone moves gradients by half of their size.
    encoded = [generator.tokenizer(sentence)["input_ids"] for sentence in SENTENCES]
    return [ids if len(ids) > 1 else [*ids, generator.tokenizer.eos_token_id] * 2 for ids in encoded]


@contextmanager
def _stand_in(generator: Generator) -> Iterator[None]:
    """Public random values in place of the adapter's, and the adapter's back again, with what of it is trained.

    B is so much smaller than A that both have gradients of like size and the model hardly notices the adapter: a
    large one makes bfloat16's rounding grow from layer to layer.
    """
    travelling = generator.travelling
    before = {name: (p.detach().clone(), p.requires_grad) for name, p in travelling.items()}
    noise = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for name, parameter in travelling.items():
                size = (0.02 if "lora_B" in name else 0.2) / parameter.shape[-1] ** 0.5
                parameter.copy_(size * torch.randn(parameter.shape, generator=noise))
        yield
    finally:
        with torch.no_grad():
            for name, (value, trained) in before.items():
                travelling[name].copy_(value)
                travelling[name].requires_grad_(trained)


def _plain_gradient(generator: Generator, batch: Batch) -> NDArray[np.float64]:
    trained = list(generator.trained.values())
    loss = document_losses(generator.model, batch).sum()
    parts = torch.autograd.grad(loss, trained, allow_unused=True) if loss.requires_grad else [None] * len(trained)
    return np.concatenate(
        [
            (torch.zeros_like(p) if part is None else part).reshape(-1).cpu().double().numpy()
            for p, part in zip(trained, parts, strict=True)
        ]
    )


def _largest_deviation(
    slots: Slots, together: Sequence[Gradient], alone: Sequence[NDArray[np.float64]]
) -> tuple[str, float]:
    worst, most = "", 0.0
    for gradient, expected in zip(together, alone, strict=True):
        floor = max(_SMALL_SHARE * float(np.linalg.norm(expected)), float(np.finfo(np.float32).tiny))
        for name, part in slots.parts.items():
            apart = float(np.linalg.norm(gradient[part] - expected[part]))
            deviation = apart / max(float(np.linalg.norm(expected[part])), floor)
            if not deviation <= most:
                worst, most = name, deviation
        if np.isnan(most):
            break
    return worst, most
