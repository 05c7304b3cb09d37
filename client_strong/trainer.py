"""DP-SGD on the adapter: E steps on Poisson-sampled units, one noise draw a step (RAFT, phase 1).

What keeps the guarantee, line by line: units are sampled by Poisson with a public rate; a document's loss depends on
that document alone; its gradient is clipped on its own; the sum is exact in integers, noised once however the batch
was chunked, and divided by a public constant; an empty batch is a step like any other; nothing but the adapter after
the last step comes back, and it is a function of noised gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

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
    """

    prompts: Sequence[Sequence[int]]
    texts: Sequence[Sequence[int]]
    order: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def __repr__(self) -> str:
        return f"TrainingDocuments(<{len(self.texts)} private documents>)"

    @classmethod
    def encode(cls, documents: Documents, generator: Generator, study: Study) -> TrainingDocuments:
        """Tokenise; a long text is cut, a text whose prompt fills the context keeps no token and trains nothing."""
        by_code = generator.prompts(study.codes)
        prompts = [by_code[code] for code in documents.codes]
        room = [study.generator.max_tokens - len(prompt) for prompt in prompts]
        order, offsets = documents.by_unit()
        return cls(prompts, generator.encode(documents.texts, room), order, offsets)


class AdapterOptimizer:
    """The local optimiser. It is fed noised gradients only, so the adapter it holds is post-processing of them."""

    def __init__(self, generator: Generator, study: Study) -> None:
        self._parameters = generator.trained
        options = study.training
        kind = torch.optim.Adam if options.optimizer == "adam" else torch.optim.SGD
        self._optimizer = kind(list(self._parameters.values()), lr=options.learning_rate)
        self._gradients: list[Noised] = []

    def step(self, gradient: Noised) -> None:
        """One step along a noised gradient of shape ``(dimension,)``."""
        start = 0
        for parameter in self._parameters.values():
            part = gradient.array[start : start + parameter.numel()]
            parameter.grad = torch.from_numpy(part.astype(np.float32)).view_as(parameter)
            start += parameter.numel()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        # The last one stands for all: the weights hold what the earlier ones did.
        self._gradients = [gradient]

    def adapter(self) -> dict[str, Noised]:
        """The adapter after the steps so far. Raises PrivacyError before the first.

        A line to audit: the weights began as the server's public adapter, and `step`, which takes noised gradients
        only, is all that has moved them. So they are post-processing of those gradients.
        """

        def weights(parameter: torch.nn.Parameter) -> Noised:
            return post_process(lambda _: parameter.detach().numpy(), self._gradients)

        return {name: weights(parameter) for name, parameter in self._parameters.items()}


def train_round(
    generator: Generator,
    documents: TrainingDocuments,
    study: Study,
    plan: StrongPlan,
    adapter: Adapter,
    gradients: PerSampleGradients,
    machine: Machine = Machine(),
    on_step: Callable[[int], None] = lambda _: None,
) -> dict[str, Noised]:
    """Run one round's E DP-SGD steps from ``adapter`` and return the noised adapter.

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
    optimizer = AdapterOptimizer(generator, study)
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
    return trained


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
        physical = Batch([documents.prompts[i] for i in chunk], [documents.texts[i] for i in chunk])
        for gradient in gradients(physical):
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
