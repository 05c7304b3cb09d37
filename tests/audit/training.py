"""Audit of a strong site: one real round of training with 1000 canaries, and a guess for each whether it was there.

Each canary is a document of random tokens, in the site's data with probability 1/2. The adversary sees the adapter
before and after `train_round`, knows the canaries and recomputes their clipped gradients at the public starting
adapter; SGD with a tiny learning rate makes the adapter's movement the sum of the noised gradients. It solves for each
canary's weight in that sum by ridge regression, the linear estimate of least error, and guesses "in" for the highest
and "out" for the lowest.

One run of 1000 perfect guesses proves no more than epsilon 4.3, so the claim that is audited must be small: 1. And
delta must be far below 1e-4. The theorem's price for delta is about ``2 * canaries * delta / (wrong guesses to
expect)``, which at 1e-4 exceeds `SIGNIFICANCE` whatever the guesses.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from client_strong.fused import FusedGradients
from client_strong.trainer import TrainingDocuments, train_round
from common.models.generator import Batch, Generator
from common.privacy.accounting import StrongPlan
from common.protocol import Adapter
from common.site.documents import Documents
from common.site.plan import strong_plan
from common.study import Study
from tests.audit.bounds import SIGNIFICANCE, one_run_epsilon
from tests.audit.finding import Audit, Measurement, Progress, quiet
from tests.hospitals import small_study
from tests.tiny_model import make_tiny_model

EPSILON, DELTA = 1.0, 1e-6
CANARIES = 1000
TOKENS = 12
CLIP = 0.005
"""Also ten times this is below every canary's gradient, which a run checks: so each is clipped, in twins too."""
LAYERS = ("gate_proj", "up_proj")
"""Adapted layers. In these, canaries' gradients are nearly orthogonal, so the attack loses little to their overlaps."""
GUESSED = 0.4
"""Share of the canaries that a guess is made for, half of them "in"; fixed before any run."""
LEARNING_RATE = 1e-3
"""So small that the canaries' gradients stay what they were at the start."""

ALMOST_NO_NOISE = 0.01
"""Noise multiplier of the twin without noise."""


@dataclass(frozen=True)
class Scene:
    """A strong site that may hold canaries, and what the adversary knows of them.

    Attributes
    ----------
    canaries
        One document per canary.
    directions
        Their gradients at the starting adapter, of norm 1, float64 ``(canaries, dimension)``.
    overlaps
        ``directions @ directions.T``.
    """

    study: Study
    generator: Generator
    start: Adapter
    canaries: Documents
    directions: NDArray[np.float64]
    overlaps: NDArray[np.float64]

    @property
    def plan(self) -> StrongPlan:
        """The real plan of this site."""
        return strong_plan(self.study, self.study.federation.min_documents)

    def with_sampling(self, sample_rate: float, steps: int) -> Scene:
        """The same site and canaries in a study with another sampling."""
        return replace(self, study=_study(self.study.generator.base, sample_rate, steps))


def _study(base: str, sample_rate: float, steps: int, **privacy: float) -> Study:
    # The size class is half of the canaries; q is B over it.
    size_class = CANARIES // 2
    raw = small_study(
        Path(base),
        privacy={"epsilon": EPSILON, "delta": DELTA, "max_grad_norm": CLIP, **privacy},
        training={
            "rounds": 1, "steps": steps, "batch_size": round(sample_rate * size_class),
            "optimizer": "sgd", "learning_rate": LEARNING_RATE,
        },
        generator={"rank": 32, "max_tokens": 48, "target_modules": LAYERS},
        federation={"min_documents": size_class},
    )  # fmt: skip
    return Study.model_validate(raw)


def scene(folder: Path, canaries: int = CANARIES) -> Scene:
    """Make model and canaries, and compute the canaries' gradients."""
    study = _study(str(_wide_model(folder)), 1.0, 1)
    generator = Generator(study.generator)
    documents = _canaries(generator, study, canaries)
    gradients = _gradients(generator, documents, study)
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    if norms.min() <= 10 * CLIP:
        raise RuntimeError(f"a canary's gradient has norm {norms.min():.3g}, not above {10 * CLIP}: it isn't clipped")
    directions = gradients / norms
    return Scene(study, generator, generator.adapter(), documents, directions, directions @ directions.T)


def _wide_model(folder: Path) -> Path:
    """The tests' tiny model, with one wider layer: adapters must have far more weights than there are canaries."""
    make_tiny_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _canaries(generator: Generator, study: Study, count: int) -> Documents:
    """Random texts, nothing like each other. They are public, so they may be seeded; who is in may not."""
    pieces = sorted(
        text for i in range(len(generator.tokenizer)) if (text := generator.tokenizer.decode([i])).isascii()
    )
    chosen = np.random.default_rng(0).choice(pieces, size=(count, TOKENS))
    texts = tuple("".join(row) for row in chosen)
    numbers = np.arange(count, dtype=np.int32)
    return Documents(texts, numbers % np.int32(len(study.codes)), numbers)


def _gradients(generator: Generator, documents: Documents, study: Study) -> NDArray[np.float64]:
    encoded = TrainingDocuments.encode(documents, generator, study)
    gradients = FusedGradients(generator)
    size = 50
    starts = range(0, len(documents), size)
    return np.array(
        [g for s in starts for g in gradients(Batch(encoded.prompts[s : s + size], encoded.texts[s : s + size]))]
    )


def as_it_ships(scene: Scene) -> tuple[Scene, StrongPlan]:
    """The site and its plan, nothing changed."""
    return scene, scene.plan


def no_noise(scene: Scene) -> tuple[Scene, StrongPlan]:
    """Twin: next to no noise."""
    return scene, _with_noise(scene.plan, ALMOST_NO_NOISE)


def clip_times_ten(scene: Scene) -> tuple[Scene, StrongPlan]:
    """Twin: gradients are clipped at 10 C, and the noise is still the one for C."""
    privacy = scene.study.privacy.model_copy(update={"max_grad_norm": 10 * CLIP})
    wrong = replace(scene, study=scene.study.model_copy(update={"privacy": privacy}))
    return wrong, _with_noise(scene.plan, scene.plan.training.noise_multiplier / 10)


def _with_noise(plan: StrongPlan, noise_multiplier: float) -> StrongPlan:
    return replace(plan, training=replace(plan.training, noise_multiplier=noise_multiplier))


def right_guesses(scene: Scene, plan: StrongPlan, progress: Progress = quiet) -> tuple[int, int]:
    """Train once on a fresh half of the canaries; (guesses made, right ones)."""
    count = len(scene.canaries)
    present = np.array([secrets.randbits(1) for _ in range(count)], dtype=bool)
    held = np.flatnonzero(present)
    documents = Documents(
        tuple(scene.canaries.texts[i] for i in held),
        scene.canaries.codes[held],
        np.arange(held.size, dtype=np.int32),
    )
    steps = scene.study.training.steps
    encoded = TrainingDocuments.encode(documents, scene.generator, scene.study)
    trained = train_round(
        scene.generator,
        encoded,
        scene.study,
        plan,
        scene.start,
        FusedGradients(scene.generator),
        on_step=lambda step: progress(step / steps),
    )
    moved = np.concatenate(
        [(scene.start[name] - value.array.astype(np.float64)).ravel() for name, value in trained.adapter.items()]
    )
    options = scene.study
    total = moved * (options.training.batch_size / options.training.learning_rate / options.privacy.max_grad_norm)
    order = np.argsort(_scores(scene, plan, total))
    side = round(count * GUESSED / 2)
    right = int(present[order[-side:]].sum() + (~present[order[:side]]).sum())
    return 2 * side, right


def _scores(scene: Scene, plan: StrongPlan, total: NDArray[np.float64]) -> NDArray[np.float64]:
    """How often each canary seems to be in ``total``, the noised sum of directions over all steps; up to a constant."""
    rate, steps = plan.training.sample_rate, plan.training.steps
    mean = rate * steps / 2
    variance = mean * (1 - rate) + mean**2
    expected = mean * scene.directions.sum(axis=0)
    # Gradients that nobody clipped are longer than C: how long shows in the sum, and the noise is that much weaker.
    length = max(1.0, float(total @ expected / (expected @ expected)))
    ridge = steps * (plan.training.noise_multiplier / length) ** 2 / variance
    surprise = scene.directions @ (total / length - expected)
    return np.linalg.solve(scene.overlaps + ridge * np.eye(len(surprise)), surprise)


def audits(folder: Path, canaries: int = CANARIES) -> Iterator[Audit]:
    """All audits of training: one full-batch step, and several Poisson-sampled ones."""
    site = scene(folder / "wide-llama", canaries)
    for rate, steps in ((1.0, 1), (0.5, 8)):
        sampled = site.with_sampling(rate, steps)
        for name, altered in (("", as_it_ships), ("noise off", no_noise), ("clip x10", clip_times_ten)):
            what = f"training, q={rate:g}, {steps} step{'s' if steps > 1 else ''}"
            yield Audit(what, name, partial(measure, *altered(sampled)))


def measure(scene: Scene, plan: StrongPlan, progress: Progress = quiet) -> Measurement:
    """Compare the bound of one run with the promise."""
    guesses, right = right_guesses(scene, plan, progress)
    bound = one_run_epsilon(len(scene.canaries), guesses, right, DELTA, SIGNIFICANCE)
    claim = scene.study.privacy.epsilon
    return Measurement(
        f"epsilon {claim:.2f} at {DELTA:g}",
        f"epsilon >= {bound:.2f} ({right} of {guesses} guesses right)",
        refuted=bound > claim,
    )
