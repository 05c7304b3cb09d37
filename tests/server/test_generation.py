"""Generation: distinct texts of the asked codes, junk dropped and counted, tries bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from common.models.generator import Generator
from common.study import Study
from server import generation
from server.decoding.engine import Continued, Source
from server.generation import SyntheticText, TextSampler
from tests.hospitals import small_study


def _sampler(base: Path, **pool: object) -> TextSampler:
    study = Study.model_validate(small_study(base, pool=pool))
    return TextSampler(Generator(study.generator), study)


class Saying:
    """An engine that answers requests with texts of a list, in turn; the last one for ever."""

    def __init__(self, sampler: TextSampler, texts: Sequence[str]) -> None:
        self._tokenizer, self._texts = sampler._tokenizer, list(texts)
        self.keys: list[int] = []

    def texts(self, source: Source, _longest: int) -> Iterator[Continued]:
        while (request := source()) is not None:
            self.keys.append(request.key)
            text = self._texts.pop(0) if len(self._texts) > 1 else self._texts[0]
            yield Continued(self._tokenizer(text)["input_ids"], ended=True)


def test_as_many_distinct_texts_as_asked_for_under_each_code(tiny_model: Path) -> None:
    sampler = _sampler(tiny_model)
    wanted = np.array([5, 0, 11, 2])
    texts = sampler.sample(wanted)
    assert np.bincount([t.code for t in texts], minlength=4).tolist() == wanted.tolist()
    assert len({t.text.casefold() for t in texts}) == len(texts)
    more = sampler.sample(wanted)
    assert not {t.text for t in texts} & {t.text for t in more}, "a later call gives fresh texts"


def test_what_no_try_can_make_is_left_out_after_bounded_tries(tiny_model: Path) -> None:
    sampler = _sampler(tiny_model, max_tries=3)
    sampler._engine = Saying(sampler, ["the same", "", " \t", "Text: again", "tone: 1", "THE SAME"])
    texts = sampler.sample(np.array([8, 0, 0, 0]))
    assert [t.text for t in texts] == ["the same"]
    assert len(set(sampler._engine.keys)) == 8 + 7 + 7, "each try has a chance of its own"
    assert sampler.drops.counts == {"empty": 2, "prompt echo": 2, "duplicate": 17}
    assert str(sampler.drops) == "17 duplicate, 2 empty, 2 prompt echo"


def test_a_model_that_only_ends_gives_no_text_and_says_so(tmp_path: Path, ending_model: Path) -> None:
    sampler = _sampler(ending_model, max_tries=2, top_p=1e-6)
    assert sampler.sample(np.array([3, 0, 2, 0])) == []
    assert sampler.drops.counts == {"empty": 10}


def test_control_characters_and_line_breaks_do_not_get_into_a_text(tiny_model: Path) -> None:
    sampler = _sampler(tiny_model)
    sampler._engine = Saying(sampler, ["a\u2028b\x00c\x1b[31m \n\nd\u202ee"])
    (text,) = sampler.sample(np.array([1, 0, 0, 0]))
    assert text.text == "a b c [31m d e"


def test_texts_that_the_limit_cuts_are_counted_and_dropped_where_the_study_says_so(tiny_model: Path) -> None:
    wanted = np.array([6, 0, 0, 6])
    keeping = _sampler(tiny_model)
    assert len(keeping.sample(wanted)) == 12
    assert keeping.drops.cut > 6, "a random model seldom ends a text of 8 tokens"
    dropping = _sampler(tiny_model, over_long="drop", max_tries=2)
    assert len(dropping.sample(wanted)) < 12
    assert dropping.drops.counts["over-long"] > 6
    assert dropping.drops.cut == 0


def test_remembered_texts_are_not_given_again(tiny_model: Path) -> None:
    wanted = np.array([6, 0, 0, 6])
    given = _sampler(tiny_model).sample(wanted, series="a")
    assert _sampler(tiny_model).sample(wanted, series="a") == given
    later = _sampler(tiny_model)
    later.remember(given)
    others = later.sample(wanted, series="a")
    assert len(others) == 12
    assert not {text.text for text in given} & {text.text for text in others}
    assert later.drops.counts["duplicate"] >= 12


def test_sampling_leaves_the_generator_and_the_random_state_alone(tiny_model: Path) -> None:
    study = Study.model_validate(small_study(tiny_model))
    generator = Generator(study.generator)
    before = {name: p.clone() for name, p in generator.model.named_parameters()}
    state = torch.random.get_rng_state()
    TextSampler(generator, study).sample(np.array([2, 2, 2, 2]))
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(before[name], p) for name, p in generator.model.named_parameters())


def test_whoever_takes_a_text_may_do_other_things_with_torch(tiny_model: Path) -> None:
    weight = torch.ones(2, requires_grad=True)
    _sampler(tiny_model).sample(np.array([2, 0, 0, 0]), lambda *_: (weight * 2).sum().backward())
    assert weight.grad is not None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_adapter_is_in_the_samples(tiny_model: Path, dtype: str) -> None:
    """With a strong adapter the merged copy says what the adapted model says, not what the base says."""
    study = Study.model_validate(small_study(tiny_model, pool={"dtype": dtype}))
    generator = Generator(study.generator)
    with torch.no_grad():
        for parameter in generator.trained.values():
            parameter.normal_(std=0.5, generator=torch.Generator().manual_seed(0))
    merged = generation._merged(generator, study.pool)
    assert merged.dtype == getattr(torch, dtype)
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        adapted = generator.model.eval()(input_ids=ids).logits
        with generator.model.disable_adapter():
            base = generator.model(input_ids=ids).logits
        found = merged(input_ids=ids).logits.float()
    size = adapted.norm()
    assert (found - adapted).norm() < size * (1e-4 if dtype == "float32" else 0.1)
    assert (base - adapted).norm() > size


def test_the_number_format_is_measured_unless_the_study_gives_one(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for fast, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(generation, "fast_bfloat16", lambda _device, fast=fast: fast)
        assert _sampler(tiny_model)._model.dtype == dtype
        assert _sampler(tiny_model, dtype="float32")._model.dtype == torch.float32
        assert _sampler(tiny_model, dtype="bfloat16")._model.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["llama", "bart"])
def test_the_same_pool_seed_gives_the_same_texts(tiny: Callable[[str], Path], kind: str) -> None:
    wanted = np.array([3, 0, 3, 0])
    one, two, other = (_sampler(tiny(kind), seed=seed).sample(wanted) for seed in (0, 0, 1))
    assert one == two
    assert one != other


def test_texts_do_not_depend_on_how_many_are_written_at_once(tiny_model: Path) -> None:
    wanted = np.array([5, 0, 6, 2])
    one, eight = (_sampler(tiny_model, batch_size=size, dtype="float32").sample(wanted) for size in (1, 8))
    assert one == eight
    assert all(isinstance(text, SyntheticText) for text in one)
