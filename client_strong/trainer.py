"""DP-SGD on the adapter: E steps on Poisson-sampled units, one noise draw a step (RAFT, phase 1).

What keeps the guarantee, line by line: units are sampled by Poisson with a public rate; a document's loss depends on
that document alone; its gradient is clipped on its own; the sum is exact in integers, noised once however the batch
was chunked, and divided by a public constant; an empty batch is a step like any other; nothing but the adapter after
the last step comes back, and it is a function of noised gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from client_strong.gradients import PerSampleGradients
from common.errors import ModelError
from common.models.generator import Batch, Generator
from common.privacy.accounting import StrongPlan
from common.privacy.bounding import sample_documents
from common.privacy.noise import Csprng, LatticeGaussian
from common.privacy.values import Noised, post_process
from common.protocol import Adapter
from common.site.config import Machine
from common.site.documents import Documents
from common.study import Study

log = logging.getLogger("fedcorpus.strong")

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What Adam keeps of a parameter; plain SGD keeps nothing."""

_CHUNK_TOKENS = 64
"""What a pass through the model costs however little goes through it, in tokens: layers are called and merged."""


@dataclass(frozen=True, repr=False)
class TrainingDocuments:
    """Token ids of a site's documents, grouped by privacy unit. Private.

    Attributes
    ----------
    prompts, texts
        Token ids of each document's condition and text; together at most ``generator.max_tokens``.
    order, offsets
        Documents of unit ``u`` are ``order[offsets[u]:offsets[u + 1]]``.
    to_batch
        How prompts and texts become what the model reads.
    """

    prompts: Sequence[Sequence[int]]
    texts: Sequence[Sequence[int]]
    order: NDArray[np.int64]
    offsets: NDArray[np.int64]
    to_batch: Callable[[Sequence[Sequence[int]], Sequence[Sequence[int]]], Batch] = Batch

    def __repr__(self) -> str:
        return f"TrainingDocuments(<{len(self.texts)} private documents>)"

    @classmethod
    def encode(cls, documents: Documents, generator: Generator, study: Study) -> TrainingDocuments:
        """Tokenise; a long text is cut, a text whose prompt fills the context keeps no token and trains nothing."""
        by_code = generator.prompts(study.codes)
        prompts = [by_code[code] for code in documents.codes]
        rooms = [generator.room(prompt) for prompt in by_code]
        order, offsets = documents.by_unit()
        texts = generator.encode(documents.texts, [rooms[code] for code in documents.codes])
        return cls(prompts, texts, order, offsets, generator.batch)

    def batch(self, chunk: Sequence[int]) -> Batch:
        """The documents of a physical chunk. Private."""
        return self.to_batch([self.prompts[i] for i in chunk], [self.texts[i] for i in chunk])


class AdapterOptimizer:
    """The local optimiser. It is fed noised gradients only, so the adapter it holds is post-processing of them.

    Parameters
    ----------
    kept
        What `state` gave at the end of the site's last round of this run, noised as it is: the moments go on from
        there. With few steps a round, an Adam that begins anew each time takes its first steps along noise alone.
        Moments of weights that this round doesn't train are handed on.

    Raises
    ------
    ModelError
        If they aren't moments of this adapter's weights.
    """

    def __init__(self, generator: Generator, study: Study, kept: Mapping[str, NDArray[Any]] | None = None) -> None:
        self._parameters = generator.trained
        options = study.training
        kind = torch.optim.Adam if options.optimizer == "adam" else torch.optim.SGD
        self._optimizer = kind(list(self._parameters.values()), lr=options.learning_rate)
        self._gradients: list[Noised] = []
        self._others = dict(kept or {})
        for name, parameter in self._parameters.items():
            moments = {m: self._others.pop(f"{m}/{name}") for m in _MOMENTS if f"{m}/{name}" in self._others}
            if moments:
                self._optimizer.state[parameter] = _moments(name, parameter, moments)

    def step(self, gradient: Noised) -> None:
        """One step along a noised gradient of shape ``(dimension,)``."""
        start = 0
        for parameter in self._parameters.values():
            part = gradient.array[start : start + parameter.numel()]
            parameter.grad = torch.from_numpy(part.astype(np.float32)).view_as(parameter).to(parameter.device)
            start += parameter.numel()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        # The last one stands for all: the weights hold what the earlier ones did.
        self._gradients = [gradient]

    def state(self) -> dict[str, Noised]:
        """Moments by ``MOMENT/PARAMETER``, for the next round. Raises PrivacyError before the first step.

        A line to audit: moments are sums of the noised gradients that `step` took, and of earlier ones' moments.
        """

        def value(tensor: torch.Tensor) -> Noised:
            return post_process(lambda _: tensor.detach().cpu().numpy(), self._gradients)

        own = {
            f"{moment}/{name}": value(tensor)
            for name, parameter in self._parameters.items()
            for moment, tensor in self._optimizer.state[parameter].items()
        }
        return own | {name: value(torch.from_numpy(array)) for name, array in self._others.items()}

    def adapter(self) -> dict[str, Noised]:
        """The adapter after the steps so far. Raises PrivacyError before the first.

        A line to audit: the weights began as the server's public adapter, and `step`, which takes noised gradients
        only, is all that has moved them, along moments that hold earlier ones. So they are post-processing of those.
        """

        def weights(parameter: torch.nn.Parameter) -> Noised:
            return post_process(lambda _: parameter.detach().cpu().numpy(), self._gradients)

        return {name: weights(parameter) for name, parameter in self._parameters.items()}


def _moments(name: str, parameter: torch.nn.Parameter, kept: Mapping[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
    """Adam's state of one parameter, as torch keeps it."""
    shapes = {moment: tuple(array.shape) for moment, array in kept.items()}
    expected = {moment: () if moment == "step" else tuple(parameter.shape) for moment in _MOMENTS}
    if shapes != expected:
        raise ModelError(f"training: kept moments of {name!r} have shapes {shapes}; {expected} are accepted")
    return {
        moment: torch.from_numpy(array.copy()).to(torch.device("cpu") if moment == "step" else parameter.device)
        for moment, array in kept.items()
    }


@dataclass(frozen=True)
class TrainedRound:
    """What a round leaves, by name of the parameter. All of it is noised.

    Attributes
    ----------
    adapter
        The trained weights after the last step.
    optimizer
        The local optimiser's moments, for the site's next round.
    """

    adapter: Mapping[str, Noised]
    optimizer: Mapping[str, Noised]


def train_round(
    generator: Generator,
    documents: TrainingDocuments,
    study: Study,
    plan: StrongPlan,
    adapter: Adapter,
    gradients: PerSampleGradients,
    machine: Machine = Machine(),
    kept: Mapping[str, NDArray[Any]] | None = None,
    on_step: Callable[[int], None] = lambda _: None,
) -> TrainedRound:
    """Run one round's E DP-SGD steps from ``adapter``.

    Parameters
    ----------
    generator
        Base model with the study's adapter attached.
    documents
        Private.
    plan
        Sample rate and noise, computed by this site.
    adapter
        The server's averaged adapter; public.
    gradients
        Of this generator.
    machine
        How much fits through the model at once.
    kept
        ``optimizer`` of the site's last round.
    on_step
        Called after each step with its number, for local progress.

    Raises
    ------
    AdapterMismatchError
        If the adapter isn't the study's.
    ModelError
        If the steps left the adapter where it was: something is wired wrongly.
    """
    generator.load_adapter(adapter)
    optimizer = AdapterOptimizer(generator, study, kept)
    randomness = Csprng()
    for step in range(1, study.training.steps + 1):
        batch = sample_documents(
            documents.order, documents.offsets, sample_rate=plan.training.sample_rate, randomness=randomness
        )
        optimizer.step(noisy_gradient(gradients, documents, batch, study, plan, randomness, machine))
        on_step(step)
    trained = optimizer.adapter()
    if all(np.array_equal(value.array, adapter[name]) for name, value in trained.items()):
        raise ModelError("training: the adapter didn't move; its layers aren't part of the model's output")
    return TrainedRound(trained, optimizer.state())


def noisy_gradient(
    gradients: PerSampleGradients,
    documents: TrainingDocuments,
    batch: NDArray[np.int64],
    study: Study,
    plan: StrongPlan,
    randomness: Csprng,
    machine: Machine = Machine(),
) -> Noised:
    """One step's release: the clipped sum over ``batch`` plus noise, over the public expected batch size.

    Parameters
    ----------
    batch
        Document indices, private, at most one per unit; may be empty.
    """
    total = LatticeGaussian(
        gradients.dimension,
        max_grad_norm=study.privacy.max_grad_norm,
        noise_multiplier=plan.training.noise_multiplier,
        randomness=randomness,
    )
    for chunk in _chunks(batch, documents, machine):
        for gradient in gradients(documents.batch(chunk)):
            total.add(gradient)
            # A view of the whole chunk's gradients: kept, it would hold them through the next chunk and the noise.
            del gradient
    return total.release(normaliser=study.training.batch_size)


def _chunks(batch: NDArray[np.int64], documents: TrainingDocuments, machine: Machine) -> Iterator[list[int]]:
    """Physical batches of documents of like length; documents without a token contribute nothing and are left out."""
    lengths = {int(i): len(documents.prompts[i]) + len(documents.texts[i]) for i in batch if documents.texts[i]}
    by_length = sorted(lengths, key=lambda i: lengths[i])
    for chunk in physical_chunks([lengths[i] for i in by_length], machine):
        yield by_length[chunk]


def physical_chunks(lengths: Sequence[int], machine: Machine) -> list[slice]:
    """Cut documents, sorted by length, so that the fewest tokens pass through the model, padding included.

    A chunk holds at most ``physical_documents`` and, padded, at most ``physical_tokens``; a longer document goes alone.
    So a long document delays the others by its own tokens, and a batch that Poisson sampling made large takes more
    chunks, not more memory.

    Parameters
    ----------
    lengths
        Tokens of each document, ascending. Private.
    """
    best, start_of = [0.0], [0]
    for end in range(1, len(lengths) + 1):
        longest, costs = lengths[end - 1], {}
        for start in range(end - 1, max(end - machine.physical_documents, 0) - 1, -1):
            if start < end - 1 and (end - start) * longest > machine.physical_tokens:
                break
            costs[start] = best[start] + _CHUNK_TOKENS + (end - start) * longest
        start_of.append(min(costs, key=lambda start: costs[start]))
        best.append(costs[start_of[-1]])
    chunks, end = list[slice](), len(lengths)
    while end:
        chunks.append(slice(start_of[end], end))
        end = start_of[end]
    return chunks[::-1]
