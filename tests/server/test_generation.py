"""Generation: distinct texts of the asked codes, junk dropped, tries bounded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from common.models.generator import Generator
from common.study import Study
from server import generation
from server.generation import TextSampler, nucleus_sample
from tests.hospitals import small_study
from tests.tiny_model import CONTEXT, ENCODER_DECODER, FAMILIES


def _sampler(base: Path, **pool: object) -> TextSampler:
    study = Study.model_validate(small_study(base, pool=pool))
    return TextSampler(Generator(study.generator), study)


def test_as_many_distinct_texts_as_asked_for_under_each_code(tiny_model: Path) -> None:
    sampler = _sampler(tiny_model)
    wanted = np.array([5, 0, 11, 2])
    texts = sampler.sample(wanted)
    assert np.bincount([t.code for t in texts], minlength=4).tolist() == wanted.tolist()
    assert len({t.text.casefold() for t in texts}) == len(texts)
    more = sampler.sample(wanted)
    assert not {t.text for t in texts} & {t.text for t in more}, "a later call gives fresh texts"


def test_what_no_try_can_make_is_left_out_after_bounded_tries(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = _sampler(tiny_model, max_tries=3)
    calls = []

    def always(codes: np.ndarray, *_: int) -> list[str]:
        calls.append(codes.size)
        return ["the same", "", " \t", "Text: again", "tone: 1", "?!"][: codes.size] + ["THE SAME"] * (codes.size - 6)

    monkeypatch.setattr(sampler, "_generate", always)
    texts = sampler.sample(np.array([8, 0, 0, 0]))
    assert [t.text for t in texts] == ["the same"]
    assert calls == [8, 7, 7]
    assert sampler.drops.counts["duplicate"] > 0
    assert sampler.drops.counts["empty"] == 9
    assert sampler.drops.counts["prompt echo"] == 6


def test_control_characters_and_line_breaks_do_not_get_into_a_text(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = _sampler(tiny_model)
    monkeypatch.setattr(sampler, "_generate", lambda codes, *_: ["a\u2028b\x00c\x1b[31m \n\nd\u202ee"] * codes.size)
    (text,) = sampler.sample(np.array([1, 0, 0, 0]))
    assert text.text == "a b c [31m d e"


def test_sampling_leaves_the_generator_and_the_random_state_alone(tiny_model: Path) -> None:
    study = Study.model_validate(small_study(tiny_model))
    generator = Generator(study.generator)
    before = {name: p.clone() for name, p in generator.model.named_parameters()}
    state = torch.random.get_rng_state()
    TextSampler(generator, study).sample(np.array([2, 2, 2, 2]))
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(before[name], p) for name, p in generator.model.named_parameters())


def test_the_adapter_is_in_the_samples(tiny_model: Path) -> None:
    """With a strong adapter the merged copy says what the adapted model says, not what the base says."""
    study = Study.model_validate(small_study(tiny_model))
    generator = Generator(study.generator)
    with torch.no_grad():
        for parameter in generator.trained.values():
            parameter.normal_(std=0.5, generator=torch.Generator().manual_seed(0))
    merged = TextSampler(generator, study)._model
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        adapted = generator.model.eval()(input_ids=ids).logits
        with generator.model.disable_adapter():
            base = generator.model(input_ids=ids).logits
        assert torch.allclose(merged(input_ids=ids).logits, adapted, atol=1e-4)
    assert not torch.allclose(adapted, base, atol=1e-2)


@pytest.mark.parametrize("head", [4, 512])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 1.0])
def test_sampled_tokens_follow_the_exact_nucleus(top_p: float, head: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the definition, by chi-square; with a head of 4 most rows need the whole vocabulary."""
    monkeypatch.setattr(generation, "HEAD", head)
    logits = torch.randn(40, generator=torch.Generator().manual_seed(0)) * 1.5
    mass = logits.softmax(0).double()
    order = mass.argsort(descending=True)
    before = mass[order].cumsum(0) - mass[order]
    nucleus = order[before < top_p]
    expected = torch.zeros(40, dtype=torch.double)
    expected[nucleus] = mass[nucleus] / mass[nucleus].sum()
    drawn = nucleus_sample(logits.expand(40_000, -1), top_p)
    counted = torch.bincount(drawn, minlength=40)
    assert counted[expected == 0].sum() == 0
    kept = expected > 0
    assert stats.chisquare(counted[kept].numpy(), (expected[kept] * 40_000).numpy()).pvalue > 1e-5


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_decode_loop_says_what_the_librarys_greedy_decoding_says(tiny: Callable[[str], Path], kind: str) -> None:
    sampler = _sampler(tiny(kind), temperature=1e-4, top_p=1e-6)
    ids = torch.tensor([sampler._prompts[0]])
    with torch.inference_mode():
        ours = sampler._decode([sampler._prompts[0]])[0]
        theirs = sampler._model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8,
            pad_token_id=sampler._tokenizer.pad_token_id,
        )[0].tolist()  # fmt: skip
    # An encoder-decoder gives the token that its decoder starts with, a causal model the prompt.
    theirs = theirs[1:] if kind in ENCODER_DECODER else theirs[ids.shape[1] :]
    end = sampler._tokenizer.eos_token_id
    assert ours == (theirs[: theirs.index(end)] if end in theirs else theirs)
    assert ours


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_padded_batch_continues_its_prompts_as_single_ones_do(tiny: Callable[[str], Path], kind: str) -> None:
    """Greedy, by a nucleus of one token: padding must not change what the model says."""
    sampler = _sampler(tiny(kind), temperature=1e-4, top_p=1e-6)
    prompts = [sampler._prompts[0], sampler._prompts[0] + sampler._prompts[1]]
    with torch.inference_mode():
        assert sampler._decode(prompts) == [sampler._decode([prompt])[0] for prompt in prompts]


def test_a_text_ends_where_the_models_context_does(tiny: Callable[[str], Path]) -> None:
    """GPT-2 has no position after its last: a longer text would be an error deep in the model."""
    sampler = _sampler(tiny("gpt2"), max_new_tokens=40)
    with torch.inference_mode():
        (row,) = sampler._decode([[5] * (CONTEXT - 3)])
    assert len(row) <= 3


@pytest.mark.parametrize("kind", ["llama", "bart"])
def test_the_same_pool_seed_gives_the_same_texts(tiny: Callable[[str], Path], kind: str) -> None:
    wanted = np.array([3, 0, 3, 0])
    one, two, other = (_sampler(tiny(kind), seed=seed).sample(wanted) for seed in (0, 0, 1))
    assert one == two
    assert one != other
