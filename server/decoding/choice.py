"""How a model is run: in slots if that gives what the model itself says, else in step.

Tried out before it is relied on, with the study's own prompts: a family that nobody thought of is either run right or
run slowly, never wrong.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch

from common.models.architectures import Architecture, EncoderDecoder, Tokens
from server.decoding import attention, packing
from server.decoding.model_slots import CausalSlots, DecoderSlots
from server.decoding.slots import InStep, Slots

log = logging.getLogger("fedcorpus.server")

_STEPS = 3
_TOLERANCE = {torch.float32: 1e-3}
_ROUNDED = 0.1
"""Of logits, relative to how they vary: wrong positions or masks change them by as much as they vary."""


def slots_for(model: Any, architecture: Architecture, prompts: Sequence[Tokens], count: int) -> Slots:
    """The fastest right way to run a model. The model is changed in place, for inference.

    Parameters
    ----------
    prompts
        All that will be asked for.
    count
        Slots: texts at once.
    """
    shortest, longest = min(prompts, key=len), max(prompts, key=len)
    with torch.inference_mode():
        said = [_in_step(model, architecture, prompt) for prompt in (longest, shortest)]
        packing.pack(model)
        before = model.config._attn_implementation
        try:
            attention.use(model)
            slots = _slots(model, architecture, len(longest), max(count, 2))
            error = _difference(slots, (longest, shortest), said)
        except Exception as cause:  # noqa: BLE001 - whatever a model of any family trips over
            error, reason = float("inf"), f"{type(cause).__name__}: {cause}"
        else:
            reason = f"its logits differ by {error:.2g} of how they vary"
        if error <= _TOLERANCE.get(model.dtype, _ROUNDED):
            return slots
    model.set_attn_implementation(before)
    log.info("generation: %s is run in step, slower: %s", type(model).__name__, reason)
    return InStep(lambda chosen: architecture.start(model, chosen))


def _slots(model: Any, architecture: Architecture, longest: int, count: int) -> Slots:
    if isinstance(architecture, EncoderDecoder):
        return DecoderSlots(model, count, architecture.first, longest)
    return CausalSlots(model, count)


def _in_step(model: Any, architecture: Architecture, prompt: Tokens) -> list[torch.Tensor]:
    """Logits after a prompt, and after some of its own tokens again: as many as the model has room for."""
    steps = _STEPS if architecture.context is None else min(_STEPS, architecture.room(prompt, architecture.context))
    continuation = architecture.start(model, [prompt])
    fed = [torch.tensor([prompt[step % len(prompt)]], device=model.device) for step in range(1, steps)]
    return [continuation.next(tokens)[0] for tokens in (None, *fed)]


def _difference(slots: Slots, prompts: Sequence[Tokens], said: Sequence[Sequence[torch.Tensor]]) -> float:
    """The largest, while two texts grow, while one begins anew and while one moves."""
    device, worst = said[0][0].device, 0.0

    def compare(which: Sequence[tuple[int, int]]) -> None:
        """Each slot with (a prompt, a step) of its own."""
        nonlocal worst
        fed = [prompts[prompt][step % len(prompts[prompt])] for prompt, step in which]
        found = slots.next(torch.tensor(fed, device=device)).float()
        for row, (prompt, step) in zip(found, which, strict=True):
            expected = said[prompt][step].float()
            varies = (expected - expected.mean()).norm().clamp(min=1e-6)
            worst = max(worst, float((row - expected).norm() / varies))

    steps = min(len(found) for found in said)
    slots.begin({0: prompts[0], 1: prompts[1]})
    for step in range(max(steps - 1, 1)):
        compare([(0, step), (1, step)])
    slots.begin({0: prompts[1]})
    if steps > 1:
        compare([(1, 0), (1, steps - 1)])
        slots.move(0, 1)
        slots.begin({0: prompts[0]})
        compare([(0, 0), (1, 1)])
    # What isn't a number is no small difference.
    return worst if math.isfinite(worst) else float("inf")
