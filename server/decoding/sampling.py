"""Exact nucleus sampling without ordering the vocabulary, from randomness that belongs to each text.

Ordering 50,000 tokens for every text and token takes longer than the model that scored them. A token is drawn from the
whole distribution instead, and taken if the mass of all more likely tokens is below top-p: drawn again otherwise, what
is taken has exactly the nucleus' distribution. Draws that fail too often, as with a tiny top-p, are made from an
ordered nucleus.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from common.errors import GenerationError

TRIES = 8
"""Draws of a token before its nucleus is ordered; with top-p 0.95 one text in 25 billion needs that."""

HEAD = 512
"""Tokens that are ordered first then; a nucleus that is larger costs a sort of the vocabulary."""

_BLOCK = 256
"""Tokens whose mass is added up at once: a draw finds its block first and then its token, in double precision."""

_STEP, _FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
"""Of SplitMix64 (Steele, Lea, Flood 2014), which turns a counter into random bits."""


def text_key(*position: object) -> int:
    """The public key of one text's randomness, 64 bits, from the study's seed and the text's place in it.

    Sampling of synthetic text is not a privacy mechanism: the key may be known to anybody.
    """
    return int.from_bytes(hashlib.blake2b(repr(position).encode(), digest_size=8).digest(), "big")


class Randomness:
    """A stream of uniform numbers for each of some rows. What a row draws depends on its key alone.

    Parameters
    ----------
    keys
        One for each row, 64 bits.
    """

    def __init__(self, keys: Sequence[int]) -> None:
        self._keys = np.array(keys, dtype=np.uint64)
        self._drawn = np.zeros(len(keys), dtype=np.uint64)

    def begin(self, row: int, key: int) -> None:
        """Start a row's stream anew."""
        self._keys[row], self._drawn[row] = key, 0

    def move(self, source: int, target: int) -> None:
        """Let a row go on at another place."""
        self._keys[target], self._drawn[target] = self._keys[source], self._drawn[source]

    def draw(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """The next number of each row, in [0, 1), of shape ``(rows,)``."""
        self._drawn[rows] += np.uint64(1)
        bits = self._keys[rows] + self._drawn[rows] * _STEP
        bits = (bits ^ (bits >> np.uint64(30))) * _FIRST
        bits = (bits ^ (bits >> np.uint64(27))) * _SECOND
        bits ^= bits >> np.uint64(31)
        return np.asarray((bits >> np.uint64(11)) * 2.0**-53)


def nucleus_sample(logits: torch.Tensor, top_p: float, randomness: Randomness) -> torch.Tensor:
    """One token a row from the nucleus: the smallest set of most likely tokens whose mass reaches ``top_p``. Exact.

    Of equally likely tokens the one with the lower number is in the nucleus first.

    Parameters
    ----------
    logits
        float32 of shape ``(rows, vocabulary)``, divided by the temperature.
    randomness
        Of as many rows, or more.

    Returns
    -------
    Tensor
        int64 of shape ``(rows,)``.

    Raises
    ------
    GenerationError
        If a row has no probabilities.
    """
    highest = logits.amax(dim=1, keepdim=True)
    if not highest.isfinite().all():
        raise GenerationError(
            "generation: the model's logits aren't finite numbers; its weights or its adapter are damaged or have "
            "grown too large"
        )
    # In place of probabilities: no division, and the most likely token always has mass 1.
    mass = (logits - highest).exp_()
    blocks = _blocks(mass).sum(dim=2)
    rows = np.arange(logits.shape[0])
    tokens = torch.empty(logits.shape[0], dtype=torch.long, device=logits.device)
    for _ in range(TRIES):
        drawn = _draw(mass, blocks, _on(randomness.draw(rows), mass))
        taken = torch.ones_like(drawn, dtype=torch.bool) if top_p >= 1 else _in_nucleus(mass, blocks, drawn, top_p)
        where = torch.from_numpy(rows).to(logits.device)
        tokens[where[taken]] = drawn[taken]
        left = (~taken).nonzero()[:, 0]
        if not left.numel():
            return tokens
        rows, mass, blocks = rows[left.cpu().numpy()], mass[left], blocks[left]
    tokens[torch.from_numpy(rows).to(logits.device)] = _from_ordered(mass, top_p, _on(randomness.draw(rows), mass))
    return tokens


def _on(numbers: NDArray[np.float64], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(numbers).to(like.device)[:, None]


def _blocks(mass: torch.Tensor) -> torch.Tensor:
    """Of shape ``(rows, blocks, tokens of a block)``; the last block is filled up with nothing."""
    short = -mass.shape[1] % _BLOCK
    filled = torch.nn.functional.pad(mass, (0, short)) if short else mass
    return filled.view(mass.shape[0], -1, _BLOCK)


def _draw(mass: torch.Tensor, blocks: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """A token of each row from the whole distribution, int64 of shape ``(rows,)``."""
    block, rest = _invert(blocks.double(), uniform)
    inside = torch.arange(_BLOCK, device=mass.device) + block * _BLOCK
    members = mass.gather(1, inside.clamp(max=mass.shape[1] - 1)).double()
    members = members.masked_fill(inside >= mass.shape[1], 0.0)
    # Divided by what was added up in single precision: scale to what the block has in double precision.
    member, _ = _invert(members, rest)
    return (block * _BLOCK + member)[:, 0]


def _invert(mass: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a share of the mass is reached, and which share of what lies there is left, both ``(rows, 1)``."""
    reached = mass.cumsum(dim=1)
    sought = uniform * reached[:, -1:]
    index = torch.searchsorted(reached, sought, right=True)
    # Rounding may lead past the last one that has any mass.
    last = torch.searchsorted(reached, reached[:, -1:].contiguous())
    index = torch.minimum(index, last)
    there = mass.gather(1, index)
    rest = (sought - (reached.gather(1, index) - there)) / there
    return index, rest.clamp(0.0, 1.0)


def _in_nucleus(mass: torch.Tensor, blocks: torch.Tensor, drawn: torch.Tensor, top_p: float) -> torch.Tensor:
    """Whether all that comes before a token has less mass than ``top_p``; bool of shape ``(rows,)``."""
    limit = top_p * blocks.double().sum(dim=1)
    own = mass.gather(1, drawn[:, None])
    nothing = mass.new_zeros(())
    taken = (torch.where(mass >= own, mass, nothing).sum(dim=1) - own[:, 0]).double() < limit
    # Where equals could matter, only those with lower numbers come before.
    (unsure,) = (~taken).nonzero(as_tuple=True)
    if unsure.numel():
        some, its = mass[unsure], own[unsure]
        lower = torch.arange(mass.shape[1], device=mass.device) < drawn[unsure, None]
        before = torch.where((some > its) | ((some == its) & lower), some, nothing)
        taken[unsure] = before.sum(dim=1, dtype=torch.double) < limit[unsure]
    return taken


def _from_ordered(mass: torch.Tensor, top_p: float, uniform: torch.Tensor) -> torch.Tensor:
    limit = top_p * mass.sum(dim=1, keepdim=True, dtype=torch.double)
    tokens = torch.empty(mass.shape[0], dtype=torch.long, device=mass.device)
    waiting = torch.arange(mass.shape[0], device=mass.device)
    for size in (min(HEAD, mass.shape[1]), mass.shape[1]):
        some = mass[waiting]
        values, order = _largest(some, size)
        # Of equals at the head's end some may be missing: all that is larger has to be enough.
        larger = values.masked_fill(values == values[:, -1:], 0.0).sum(dim=1, keepdim=True, dtype=torch.double)
        whole = ((larger >= limit[waiting]) | (size == mass.shape[1]))[:, 0]
        values = values.double()
        before = values.cumsum(dim=1) - values
        index, _ = _invert(values * (before < limit[waiting]), uniform[waiting])
        tokens[waiting[whole]] = order.gather(1, index)[whole, 0]
        waiting = waiting[~whole]
    return tokens


def _largest(mass: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest values, descending, equals by number; and their numbers. Both of shape ``(rows, size)``."""
    numbers = mass.topk(size, dim=1, sorted=False).indices.sort(dim=1).values
    values, order = mass.gather(1, numbers).sort(dim=1, descending=True, stable=True)
    return values, numbers.gather(1, order)
