"""Attention of one new token to kept keys and values, in float32.

torch's fused attention is made for long queries. For a single token on a CPU plain products are up to four times as
fast, in float32 more than in bfloat16, where every product converts what it reads. It is a kind of attention that
transformers takes by name, so it works for every model that takes any.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

NAME = "fedcorpus-slots"


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Softmax attention as transformers asks for it.

    Parameters
    ----------
    query
        Of shape ``(rows, heads, tokens, width)``.
    key, value
        Of shape ``(rows, key heads, positions, width)``; float32 if they were kept.
    attention_mask, position_bias
        Added to the scores, broadcast to ``(rows, heads, tokens, positions)``.
    """
    rows, heads, tokens, width = query.shape
    scale = width**-0.5 if scaling is None else scaling
    shared = heads // key.shape[1]
    # The heads that share a key are rows of one product.
    grouped = query.to(key.dtype).reshape(rows, key.shape[1], shared * tokens, width) * scale
    scores = torch.matmul(grouped, key.transpose(2, 3)).float().view(rows, heads, tokens, -1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    for added in (position_bias, attention_mask):
        if added is not None:
            scores = scores + added
    weights = scores.softmax(dim=-1).to(value.dtype).view(rows, key.shape[1], shared * tokens, -1)
    output = torch.matmul(weights, value).view(rows, heads, tokens, -1)
    return output.transpose(1, 2).to(query.dtype).contiguous(), None


def use(model: Any) -> None:
    """Let a model attend in this way from now on."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, eager_mask)
    model.set_attn_implementation(NAME)
