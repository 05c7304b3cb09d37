"""DP-SGD: the sensitivity is C, the noise is the plan's, and the warnings of Opacus + Hugging Face don't apply."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from client_strong import trainer
from client_strong.fused import FusedGradients
from client_strong.trainer import (
    AdapterOptimizer,
    TrainingDocuments,
    noisy_gradient,
    physical_chunks,
    train_round,
)
from common.errors import AdapterMismatchError, ModelError, PrivacyError
from common.models.generator import Batch, Generator, document_losses
from common.privacy.accounting import DiscreteGaussian, StrongPlan, SubsampledGaussian
from common.privacy.noise import Csprng
from common.privacy.values import Noised, noised
from common.site.config import Machine
from common.site.documents import Documents
from common.study import Study
from tests.hospitals import small_study

CLIP = 1e-2


class _Silent(Csprng):
    """The protection off: shows the clipped sum itself."""

    def normal(self, size: int) -> np.ndarray:
        return np.zeros(size)


def _study(base: Path, **privacy: float) -> Study:
    return Study.model_validate(small_study(base, privacy={"max_grad_norm": CLIP, **privacy}))


def _plan(noise_multiplier: float, sample_rate: float = 1.0) -> StrongPlan:
    return StrongPlan(SubsampledGaussian(noise_multiplier, sample_rate, 1), DiscreteGaussian(4.0, 1), 8.0, 1e-4)


def _documents(generator: Generator, texts: list[str], room: int = 40) -> TrainingDocuments:
    prompts = [generator.prompts(Study.model_validate(small_study(Path("."))).codes)[0]] * len(texts)
    units = np.arange(len(texts) + 1)
    return TrainingDocuments(prompts, generator.encode(texts, [room] * len(texts)), units[:-1], units)


def _warm(generator: Generator) -> None:
    """B starts at zero, where the gradients of A vanish; move away from it."""
    with torch.no_grad():
        for parameter in generator.trained.values():
            parameter.normal_(std=0.05, generator=torch.Generator().manual_seed(1))


TEXTS = [f"The staff were kind, visit {i}." for i in range(30)]
LONG = "Parking is difficult and the ward was too warm. " * 8


@pytest.fixture(params=["llama", "gpt2"])
def generator(request: pytest.FixtureRequest, tiny_model: Path, tiny_gpt2: Path) -> Generator:
    made = Generator(_study(tiny_model if request.param == "llama" else tiny_gpt2).generator)
    _warm(made)
    return made


def test_per_sample_gradients_equal_one_document_at_a_time(generator: Generator) -> None:
    documents = _documents(generator, ["Kind.", LONG, "I waited three hours and nobody told me why."])
    together = list(FusedGradients(generator)(Batch(documents.prompts, documents.texts)))
    for index, gradient in enumerate(together):
        (alone,) = FusedGradients(generator)(
            Batch(documents.prompts[index : index + 1], documents.texts[index : index + 1])
        )
        assert np.linalg.norm(alone) > 0
        assert np.linalg.norm(gradient - alone) <= 1e-5 * np.linalg.norm(alone)


def _moved_by_one_document(generator: Generator, losses: object) -> float:
    """How far one extra long document moves the clipped sum, over C; no noise."""

    def clipped_sum(texts: list[str]) -> np.ndarray:
        documents = _documents(generator, texts, room=120)
        total = np.zeros(FusedGradients(generator).dimension)
        for gradient in FusedGradients(generator, losses)(Batch(documents.prompts, documents.texts)):  # type: ignore[arg-type]
            total += gradient * min(1.0, clip / np.linalg.norm(gradient))
        return total

    documents = _documents(generator, TEXTS, room=120)
    norms = [np.linalg.norm(g) for g in FusedGradients(generator)(Batch(documents.prompts, documents.texts))]
    clip = 1.05 * float(np.median(norms))
    return float(np.linalg.norm(clipped_sum([*TEXTS, LONG]) - clipped_sum(TEXTS)) / clip)


def _batch_mean_losses(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """What a library's ``outputs.loss`` is: the mean over all tokens of the batch (times its size, for a sum)."""
    logits = model(**batch.inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    return loss.expand(batch.documents)


def test_one_extra_long_document_moves_the_sum_by_at_most_c(generator: Generator) -> None:
    assert _moved_by_one_document(generator, document_losses) <= 1 + 1e-3


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(st.characters(codec="ascii"), max_size=60), min_size=1, max_size=6),
    extra=st.text(st.characters(codec="ascii"), max_size=120),
    clip=st.sampled_from([1e-3, 0.1, 10.0]),
    chunk=st.integers(1, 4),
)
def test_any_document_moves_the_clipped_sum_by_at_most_c(
    generator: Generator, texts: list[str], extra: str, clip: float, chunk: int
) -> None:
    """Brute force over neighbours, through the real step with the noise off; the last bits of a gradient may differ."""
    study, machine = _study(Path("."), max_grad_norm=clip), Machine(physical_documents=chunk)
    documents, gradients = _documents(generator, [*texts, extra]), FusedGradients(generator)

    def step(batch: np.ndarray) -> np.ndarray:
        released = noisy_gradient(gradients, documents, batch, study, _plan(1.0), _Silent(), machine)
        return released.array * study.training.batch_size

    everyone = np.arange(len(texts) + 1)
    assert np.linalg.norm(step(everyone) - step(everyone[:-1])) <= clip * (1 + 1e-4)


def test_the_batch_mean_loss_breaks_the_same_bound(generator: Generator) -> None:
    """Twin: it must fail, or the test above shows nothing."""
    assert _moved_by_one_document(generator, _batch_mean_losses) > 1.3


def test_a_step_adds_or_removes_one_document_by_at_most_c_over_b(tiny_model: Path) -> None:
    study = _study(tiny_model)
    generator = Generator(study.generator)
    _warm(generator)
    gradients = FusedGradients(generator)
    documents = _documents(generator, [*TEXTS, LONG])

    def step(batch: np.ndarray) -> np.ndarray:
        return noisy_gradient(gradients, documents, batch, study, _plan(1.0), _Silent()).array

    everyone = np.arange(len(TEXTS) + 1)
    moved = np.linalg.norm(step(everyone) - step(everyone[:-1])) * study.training.batch_size
    assert 0.9 * CLIP < moved <= 1.001 * CLIP


def test_chunks_do_not_change_the_sum_and_noise_is_drawn_once(tiny_model: Path) -> None:
    study = _study(tiny_model)
    machines = [Machine(physical_documents=n) for n in (1, 4, 64)]
    generator = Generator(study.generator)
    _warm(generator)
    gradients, documents = FusedGradients(generator), _documents(generator, TEXTS)
    batch = np.arange(len(TEXTS))
    sums = [noisy_gradient(gradients, documents, batch, study, _plan(1.0), _Silent(), m).array for m in machines]
    np.testing.assert_allclose(sums[0], sums[1], atol=1e-6 * CLIP)
    np.testing.assert_allclose(sums[0], sums[2], atol=1e-6 * CLIP)
    noisy = noisy_gradient(gradients, documents, batch, study, _plan(50.0), Csprng()).array - sums[0]
    expected = 50.0 * CLIP / study.training.batch_size
    assert abs(noisy.std() / expected - 1) < 5 / np.sqrt(2 * noisy.size), "30 chunks, one noise draw"


def test_an_empty_poisson_batch_is_a_noise_only_step(tiny_model: Path) -> None:
    study = _study(tiny_model)
    generator = Generator(study.generator)
    documents = _documents(generator, TEXTS)
    empty = np.zeros(0, np.int64)
    step = noisy_gradient(FusedGradients(generator), documents, empty, study, _plan(2.0), Csprng()).array
    expected = 2.0 * CLIP / study.training.batch_size
    assert abs(step.std() / expected - 1) < 5 / np.sqrt(2 * step.size)


def test_a_round_moves_the_adapter_and_every_weight_is_finite(tiny_model: Path) -> None:
    study = _study(tiny_model)
    generator = Generator(study.generator)
    before = generator.adapter()
    trained = train_round(
        generator, _documents(generator, TEXTS), study, _plan(1.0, 0.3), before, FusedGradients(generator)
    )
    assert set(trained.adapter) == set(before)
    assert all(np.isfinite(value.array).all() for value in trained.adapter.values())
    assert all(not np.array_equal(trained.adapter[name].array, before[name]) for name in before)


def test_two_rounds_with_equal_seeds_differ(tiny_model: Path) -> None:
    study = _study(tiny_model)
    generator = Generator(study.generator)
    start, documents = generator.adapter(), _documents(generator, TEXTS)
    results = []
    for _ in range(2):
        torch.manual_seed(0), np.random.seed(0)
        gradients = FusedGradients(generator)
        results.append(train_round(generator, documents, study, _plan(1.0, 0.3), start, gradients).adapter)
    assert any(not np.array_equal(results[0][name].array, results[1][name].array) for name in start)


def test_nothing_exact_is_left_on_the_model(tiny_model: Path) -> None:
    study = _study(tiny_model)
    generator = Generator(study.generator)
    train_round(
        generator, _documents(generator, TEXTS), study, _plan(1.0, 0.5), generator.adapter(), FusedGradients(generator)
    )
    for parameter in generator.model.parameters():
        assert parameter.grad is None
        assert getattr(parameter, "grad_sample", None) is None


def test_an_adapter_that_is_not_the_studys_is_refused(tiny_model: Path) -> None:
    study = _study(tiny_model)
    generator = Generator(study.generator)
    documents, adapter = _documents(generator, TEXTS), generator.adapter()
    name = next(iter(adapter))
    for wrong in (
        {k: v for k, v in adapter.items() if k != name},
        adapter | {name: adapter[name][:, :1]},
        adapter | {name: np.full_like(adapter[name], np.nan)},
        adapter | {"more": adapter[name]},
    ):
        with pytest.raises(AdapterMismatchError):
            train_round(generator, documents, study, _plan(1.0), wrong, FusedGradients(generator))


def _gradient(generator: Generator, seed: int) -> Noised:
    """Public numbers that stand for a noised gradient."""
    dimension = sum(p.numel() for p in generator.trained.values())
    return noised(np.random.default_rng(seed).standard_normal(dimension))


def _steps(study: Study, rounds: list[list[int]], *, keep: bool) -> dict[str, np.ndarray]:
    """The adapter after rounds of steps, each of which a new optimiser takes."""
    generator = Generator(study.generator)
    kept: dict[str, np.ndarray] = {}
    for seeds in rounds:
        optimizer = AdapterOptimizer(generator, study, kept if keep else None)
        for seed in seeds:
            optimizer.step(_gradient(generator, seed))
        kept = {name: value.array for name, value in optimizer.state().items()}
    return generator.adapter()


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_an_optimiser_that_is_kept_goes_on_over_rounds_as_if_there_were_none(tiny_model: Path, optimizer: str) -> None:
    study = Study.model_validate(small_study(tiny_model, training={"optimizer": optimizer, "learning_rate": 0.01}))
    whole = _steps(study, [[1, 2, 3, 4]], keep=True)
    rounds = _steps(study, [[1], [2, 3], [4]], keep=True)
    afresh = _steps(study, [[1], [2, 3], [4]], keep=False)
    assert all(np.array_equal(whole[name], rounds[name]) for name in whole)
    # Twin: an Adam that begins anew goes another way; plain SGD has nothing to keep.
    assert all(np.array_equal(whole[name], afresh[name]) for name in whole) == (optimizer == "sgd")


def test_kept_moments_of_another_adapter_are_refused(tiny_model: Path) -> None:
    study = _study(tiny_model)
    generator = Generator(study.generator)
    optimizer = AdapterOptimizer(generator, study)
    optimizer.step(_gradient(generator, 1))
    kept = {name: value.array for name, value in optimizer.state().items()}
    name = next(name for name in kept if name.startswith("exp_avg/"))
    for wrong in (kept | {name: kept[name][:1]}, {n: a for n, a in kept.items() if n != name}):
        with pytest.raises(ModelError, match="kept moments of"):
            AdapterOptimizer(generator, study, wrong)


def test_an_optimiser_keeps_nothing_before_its_first_noised_gradient(tiny_model: Path) -> None:
    study = _study(tiny_model)
    kept = {"exp_avg/of another round": np.ones(3)}
    with pytest.raises(PrivacyError, match="no noised value"):
        AdapterOptimizer(Generator(study.generator), study, kept).state()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 300), max_size=9).map(sorted), st.integers(1, 5), st.integers(1, 400))
def test_chunks_hold_every_document_once_stay_within_their_bounds_and_waste_least(
    lengths: list[int], documents: int, tokens: int
) -> None:
    machine = Machine(physical_documents=documents, physical_tokens=tokens)
    chunks = [lengths[chunk] for chunk in physical_chunks(lengths, machine)]
    assert [length for chunk in chunks for length in chunk] == lengths
    assert all(_allowed(chunk, machine) for chunk in chunks)
    assert _cost(chunks) == min(_cost(cut) for cut in _all_cuts(lengths) if all(_allowed(c, machine) for c in cut))


def _allowed(chunk: list[int], machine: Machine) -> bool:
    fits = len(chunk) * chunk[-1] <= machine.physical_tokens
    return len(chunk) <= machine.physical_documents and (fits or len(chunk) == 1)


def _cost(chunks: list[list[int]]) -> int:
    return sum(len(chunk) * chunk[-1] + trainer._CHUNK_TOKENS for chunk in chunks)


def _all_cuts(lengths: list[int]) -> Iterator[list[list[int]]]:
    if not lengths:
        yield []
    for size in range(1, len(lengths) + 1):
        yield from ([lengths[:size], *rest] for rest in _all_cuts(lengths[size:]))


def test_a_document_of_4000_tokens_adds_its_own_tokens_and_a_batch_three_times_as_large_no_memory() -> None:
    machine = Machine(physical_documents=16, physical_tokens=2048)
    batch = sorted(np.random.default_rng(0).integers(8, 129, 16).tolist())

    def padded(lengths: list[int]) -> list[int]:
        return [len(lengths[c]) * lengths[c][-1] for c in physical_chunks(lengths, machine)]

    assert sum(padded([*batch, 4000])) == sum(padded(batch)) + 4000
    assert max(padded(sorted(batch * 3))) <= 2048
    assert len(padded(sorted(batch * 3))) > len(padded(batch))


def test_a_document_whose_loss_is_not_a_number_counts_as_nothing(generator: Generator) -> None:
    """One NaN would make the whole release NaN, and so tell that its document was in the batch."""
    study, documents = _study(Path(".")), _documents(generator, TEXTS[:3])

    def losses(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        values = document_losses(model, batch)
        return torch.cat([values[:1] * float("nan"), values[1:]])

    def step(gradients: FusedGradients, chosen: list[int]) -> np.ndarray:
        return noisy_gradient(gradients, documents, np.array(chosen), study, _plan(1.0), _Silent()).array

    with_nan = step(FusedGradients(generator, losses), [0, 1, 2])
    np.testing.assert_allclose(with_nan, step(FusedGradients(generator), [1, 2]), atol=1e-6 * CLIP)
    assert np.abs(step(FusedGradients(generator), [0, 1, 2]) - with_nan).max() > 1e-3 * CLIP


@pytest.mark.parametrize("texts", [[""], ["   "], ["One."], ["word " * 500]], ids=["empty", "blank", "one", "long"])
def test_a_site_with_a_single_odd_document_trains(tiny_model: Path, texts: list[str]) -> None:
    study = _study(tiny_model)
    generator = Generator(study.generator)
    documents = Documents(tuple(texts), np.zeros(1, np.int32), np.zeros(1, np.int32))
    encoded = TrainingDocuments.encode(documents, generator, study)
    assert len(encoded.prompts[0]) + len(encoded.texts[0]) <= study.generator.max_tokens
    start, gradients = generator.adapter(), FusedGradients(generator)
    trained = train_round(generator, encoded, study, _plan(1.0), start, gradients)
    assert all(np.isfinite(value.array).all() for value in trained.adapter.values())


def test_a_prompt_that_fills_the_context_leaves_noise_only(tiny_model: Path) -> None:
    raw = small_study(tiny_model, generator={"max_tokens": 8}, pool={"max_new_tokens": 8})
    study = Study.model_validate(raw)
    generator = Generator(study.generator)
    documents = Documents(tuple(TEXTS), np.zeros(len(TEXTS), np.int32), np.arange(len(TEXTS), dtype=np.int32))
    encoded = TrainingDocuments.encode(documents, generator, study)
    assert not any(encoded.texts)
    everyone = np.arange(len(TEXTS))
    gradients = FusedGradients(generator)
    assert not noisy_gradient(gradients, encoded, everyone, study, _plan(1.0), _Silent()).array.any()


def test_documents_do_not_print(tiny_model: Path) -> None:
    generator = Generator(_study(tiny_model).generator)
    assert "staff" not in repr(_documents(generator, TEXTS))
