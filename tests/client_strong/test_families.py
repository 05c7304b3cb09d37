"""Every supported family, the whole way through: a document's gradient, the self-test, the loss, the merged model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from client_strong.fused import FusedGradients
from client_strong.gradient_check import check_gradients
from client_strong.gradients import OpacusGradients
from client_strong.trainer import TrainingDocuments, train_round
from common.errors import ModelError
from common.models.generator import Batch, Generator, document_losses
from common.models.lora import trained_names
from common.privacy.accounting import DiscreteGaussian, StrongPlan, SubsampledGaussian
from common.study import Study
from server.generation import TextSampler
from tests.hospitals import small_study
from tests.tiny_model import ENCODER_DECODER, FAMILIES

Tiny = Callable[[str], Path]

PROMPTS = [[3, 4, 5], [6], [7, 8] * 5, [9, 10]]
TEXTS = [[11, 12, 13, 14, 15], [21] * 40, [31, 32], list(range(40, 61))]

OPACUS_CANNOT = {"opt"}
"""Its layers flatten documents and tokens into one axis, where Opacus takes every token for a document."""

CAPPED = {"gemma2"}
"""Its logits aren't its head's output."""

LORA = [("ffa", 1), ("plain", 1), ("alternating", 1), ("alternating", 2)]


def _generator(base: Path, lora: str = "plain", server_round: int = 1, **options: Any) -> Generator:
    study = small_study(base, generator={"lora": lora, **options})
    generator = Generator(Study.model_validate(study).generator, device="cpu")
    generator.start_round(server_round)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        # B starts at zero, where the gradients of A vanish.
        for name, parameter in generator.travelling.items():
            parameter.normal_(std=0.02 if "lora_B" in name else 0.2, generator=noise)
    return generator


def _batch(generator: Generator, documents: Iterable[int] = range(len(TEXTS))) -> Batch:
    chosen = list(documents)
    return generator.batch([PROMPTS[i] for i in chosen], [TEXTS[i] for i in chosen])


def _alone(generator: Generator) -> list[np.ndarray]:
    """Micro-batches of one document by autograd, without a line of the code under test."""
    gradients = []
    for index in range(len(TEXTS)):
        loss = document_losses(generator.model, _batch(generator, [index])).sum()
        parts = torch.autograd.grad(loss, list(generator.trained.values()))
        gradients.append(torch.cat([part.reshape(-1) for part in parts]).numpy())
    return gradients


def _apart(one: Iterable[np.ndarray], other: Iterable[np.ndarray]) -> float:
    """Largest relative deviation of a document's gradient, which bounds that of its norm."""
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(one, other, strict=True))


def batch_mean(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """What a library's loss is: the mean over all tokens of the batch."""
    logits = model(**batch.inputs, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    return loss.expand(batch.documents)


@pytest.mark.parametrize(("lora", "server_round"), LORA)
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_documents_gradient_is_that_of_a_micro_batch(tiny: Tiny, kind: str, lora: str, server_round: int) -> None:
    generator = _generator(tiny(kind), lora, server_round)
    expected, batch = _alone(generator), _batch(generator)
    assert {"A" if "lora_A" in name else "B" for name in generator.trained} == {
        ("ffa", 1): {"B"}, ("plain", 1): {"A", "B"}, ("alternating", 1): {"B"}, ("alternating", 2): {"A"},
    }[lora, server_round]  # fmt: skip
    assert _apart(FusedGradients(generator)(batch), expected) < 1e-5
    assert _apart(FusedGradients(generator, checkpointing=True)(batch), expected) < 1e-5
    if kind not in OPACUS_CANNOT:
        assert _apart(OpacusGradients(generator)(batch), expected) < 1e-5


@pytest.mark.parametrize("kind", FAMILIES)
def test_with_a_batch_mean_it_would_not_be(tiny: Tiny, kind: str) -> None:
    """Twin of the above."""
    generator = _generator(tiny(kind))
    assert _apart(FusedGradients(generator, batch_mean)(_batch(generator)), _alone(generator)) > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", ["plain", "alternating"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_self_test_passes_and_leaves_everything_as_it_was(tiny: Tiny, kind: str, lora: str, dtype: str) -> None:
    generator = _generator(tiny(kind), lora, dtype=dtype)
    before, trained = generator.adapter(), list(generator.trained)
    check_gradients(generator, FusedGradients(generator))
    if kind not in OPACUS_CANNOT:
        check_gradients(generator, OpacusGradients(generator))
    assert list(generator.trained) == trained
    assert all(np.array_equal(before[name], value) for name, value in generator.adapter().items())


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_self_test_refuses_a_batch_mean(tiny: Tiny, kind: str) -> None:
    """Twin of the above."""
    generator = _generator(tiny(kind))
    with pytest.raises(ModelError, match="refuses to train"):
        check_gradients(generator, FusedGradients(generator, batch_mean))


@pytest.mark.parametrize("kind", sorted(OPACUS_CANNOT))
def test_what_opacus_cannot_is_refused(tiny: Tiny, kind: str) -> None:
    generator = _generator(tiny(kind))
    with pytest.raises(ModelError, match="refuses to train"):
        check_gradients(generator, OpacusGradients(generator))


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_lean_loss_is_the_loss_of_all_logits(tiny: Tiny, kind: str) -> None:
    generator = _generator(tiny(kind))
    losses, batch = FusedGradients(generator)._losses, _batch(generator)
    assert (losses is document_losses) == (kind in CAPPED)
    with torch.no_grad():
        expected = document_losses(generator.model, batch)
        np.testing.assert_allclose(losses(generator.model, batch).numpy(), expected.numpy(), rtol=1e-6)


def test_a_bart_whose_head_has_a_bias_of_its_own_gets_the_plain_loss(tiny: Tiny) -> None:
    generator = _generator(tiny("bart"))
    generator.model.get_base_model().final_logits_bias[0, 7] = 1.0
    gradients = FusedGradients(generator)
    assert gradients._losses is document_losses
    assert _apart(gradients(_batch(generator)), _alone(generator)) < 1e-5


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_documents_loss_depends_on_it_alone(tiny: Tiny, kind: str) -> None:
    generator = _generator(tiny(kind))
    with torch.no_grad():
        together = document_losses(generator.model, _batch(generator)).numpy()
        alone = [document_losses(generator.model, _batch(generator, [i])).item() for i in range(len(TEXTS))]
        mean = batch_mean(generator.model, _batch(generator)).numpy()
    np.testing.assert_allclose(together, alone, rtol=1e-5)
    assert np.abs(mean - alone).max() > 1e-3, "twin"


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_merged_model_says_what_the_adapted_one_does(tiny: Tiny, kind: str) -> None:
    study = Study.model_validate(small_study(tiny(kind), generator={"lora": "plain"}, pool={"dtype": "float32"}))
    generator = _generator(tiny(kind))
    merged, inputs = TextSampler(generator, study)._model, _batch(generator).inputs
    adapted = generator.model.eval()
    with torch.no_grad():
        expected, found = adapted(**inputs).logits, merged(**inputs).logits
        with adapted.disable_adapter():
            bare = adapted(**inputs).logits
    real = inputs.get("decoder_attention_mask", inputs["attention_mask"]).bool()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(bare[real], expected[real], rtol=1e-4, atol=1e-4), "twin: the adapter is seen at all"


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_model_made_with_dropout_draws_nothing(tiny: Tiny, kind: str) -> None:
    """BART, T5, GPT-2 and OPT drop a tenth by default, some by functions that no module stands for."""
    dropped = [
        value for name, value in AutoConfig.from_pretrained(tiny(kind)).to_dict().items()
        if "drop" in name and isinstance(value, float)
    ]  # fmt: skip
    generator = _generator(tiny(kind))
    gradients, batch = FusedGradients(generator), _batch(generator)
    state = torch.random.get_rng_state()
    assert all(np.array_equal(a, b) for a, b in zip(gradients(batch), gradients(batch), strict=True))
    assert torch.equal(state, torch.random.get_rng_state())
    assert any(dropped) == (kind in {"gpt2", "opt", *ENCODER_DECODER})


@pytest.mark.parametrize("place", ["model.decoder.layers.1.self_attn", "model.encoder"])
def test_dropout_by_a_function_is_refused(tiny: Tiny, place: str) -> None:
    generator = _generator(tiny("bart"))
    part = generator.model.get_base_model().get_submodule(place)
    name = "dropout" if hasattr(part, "dropout") else "layerdrop"
    setattr(part, name, 0.25)
    with pytest.raises(ModelError, match=rf"{place}' has a dropout of 0\.25"):
        FusedGradients(generator)


@pytest.mark.parametrize("server_round", [1, 2])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_round_moves_what_it_trains(tiny: Tiny, kind: str, server_round: int) -> None:
    study = Study.model_validate(small_study(tiny(kind), generator={"lora": "alternating"}))
    generator = _generator(tiny(kind), "alternating", server_round)
    units = np.arange(len(TEXTS) + 1)
    documents = TrainingDocuments(PROMPTS, TEXTS, units[:-1], units, generator.batch)
    plan = StrongPlan(SubsampledGaussian(1.0, 0.5, 2), DiscreteGaussian(4.0, 1), 8.0, 1e-4)
    start = generator.adapter()
    trained = train_round(generator, documents, study, plan, start, FusedGradients(generator))
    answered = {name: value.array for name, value in trained.adapter.items()}
    assert list(answered) == trained_names("alternating", start, server_round)
    assert all(not np.array_equal(start[name], value) for name, value in answered.items())
    assert all(np.array_equal(start[n], value) for n, value in generator.adapter().items() if n not in answered)


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_gradients_follow_the_round(tiny: Tiny, kind: str) -> None:
    """One process and one set of gradients serve many rounds."""
    generator = _generator(tiny(kind), "alternating")
    gradients = {name: made(generator) for name, made in (("fused", FusedGradients), ("opacus", OpacusGradients))}
    for server_round in (1, 2, 3):
        generator.start_round(server_round)
        expected = _alone(generator)
        for computed in gradients.values():
            assert computed.dimension == expected[0].size
            assert _apart(computed(_batch(generator)), expected) < 1e-5


def test_a_weight_that_a_round_sets_free_is_refused_at_the_next_batch(tiny: Tiny) -> None:
    generator = _generator(tiny("llama"))
    gradients = FusedGradients(generator)
    generator.model.get_base_model().model.norm.weight.requires_grad_(True)
    with pytest.raises(ModelError, match=r"norm\.weight' is trained but is no A or B"):
        next(gradients(_batch(generator)))


def test_the_self_test_sees_a_wrong_factor_of_a_later_round(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """In round 1 an alternating adapter trains B only; A must be right as well before anything is trained."""
    generator = _generator(tiny("llama"), "alternating")
    gradients = FusedGradients(generator)
    inner = FusedGradients.__call__

    def half_of_a(self: FusedGradients, batch: Batch) -> Iterable[np.ndarray]:
        only_a = all("lora_A" in name for name in generator.trained)
        return (gradient / 2 if only_a else gradient for gradient in inner(self, batch))

    check_gradients(generator, gradients)
    monkeypatch.setattr(FusedGradients, "__call__", half_of_a)
    trained = list(generator.trained)
    with pytest.raises(ModelError, match=r"lora_A.*refuses to train"):
        check_gradients(generator, gradients)
    assert list(generator.trained) == trained


@pytest.mark.parametrize("kind", FAMILIES)
def test_nothing_is_left_on_the_model(tiny: Tiny, kind: str) -> None:
    """Also where the model was stopped at its head."""
    generator = _generator(tiny(kind))
    gradients = FusedGradients(generator, checkpointing=True)

    def state() -> list[tuple[str, list[str]]]:
        return [(name, sorted(vars(part))) for name, part in generator.model.named_modules()]

    before, config = state(), copy.deepcopy(generator.model.config.to_dict())
    list(gradients(_batch(generator)))
    assert state() == before
    assert generator.model.config.to_dict() == config
    assert all(parameter.grad is None for parameter in generator.model.parameters())
