"""Slots that are refilled write what the model alone would: same texts, same distribution, every family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from common.models.generator import Generator
from common.study import Study
from server import generation
from server.decoding import model_slots
from server.decoding.choice import slots_for
from server.decoding.engine import Continued, Engine, Request
from server.decoding.sampling import text_key
from server.decoding.slots import InStep, Slots, UnsuitableModelError
from tests.hospitals import small_study
from tests.server.decoding.test_sampling import nucleus, pvalue
from tests.tiny_model import CONTEXT, ENCODER_DECODER, FAMILIES

LONGEST = 12


class Writer:
    """A generator's merged model, in slots, and what the model says by itself."""

    def __init__(self, base: Path, dtype: str = "float32") -> None:
        study = Study.model_validate(small_study(base, pool={"dtype": dtype}))
        generator = Generator(study.generator)
        self.tokenizer, self.architecture = generator.tokenizer, generator.architecture
        self.prompts = generator.prompts(study.codes)
        # Of different lengths, and more than there are slots.
        self.prompts = [*self.prompts, self.prompts[0] + self.prompts[1][:7], self.prompts[2][:5]]
        self.plain = generation._merged(generator, study.pool)
        self.merged = generation._merged(generator, study.pool)

    def slots(self, count: int) -> Slots:
        return slots_for(self.merged, self.architecture, self.prompts, count)

    def in_step(self) -> Slots:
        return InStep(lambda chosen: self.architecture.start(self.plain, chosen))

    def write(
        self, slots: Slots, count: int, requests: Sequence[Request], temperature: float = 1.0, top_p: float = 0.95,
        end: int | None = None,
    ) -> list[Continued]:  # fmt: skip
        engine = Engine(
            slots, count, self.tokenizer.eos_token_id if end is None else end, temperature, top_p, torch.device("cpu")
        )
        waiting = iter(requests)
        return list(engine.texts(lambda: next(waiting, None), LONGEST))

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], *tokens: int) -> torch.Tensor:
        """Of the token after a prompt and some tokens, by the model's plain forward pass."""
        ids = torch.tensor([list(prompt)])
        if not self.plain.config.is_encoder_decoder:
            return self.plain(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, -1]
        decoded = torch.tensor([[self.architecture.first, *tokens]])
        return self.plain(input_ids=ids, decoder_input_ids=decoded).logits[0, -1]


@pytest.fixture(scope="module")
def writer(tiny: Callable[[str], Path]) -> Callable[[str], Writer]:
    made: dict[str, Writer] = {}
    return lambda kind: made.setdefault(kind, Writer(tiny(kind)))


def _requests(writer: Writer, count: int) -> list[Request]:
    """Of all prompts in turn; some are cut early."""
    return [
        Request(writer.prompts[i % len(writer.prompts)], text_key("test", i), LONGEST - i % 3) for i in range(count)
    ]


@pytest.mark.parametrize("kind", FAMILIES)
def test_refilled_slots_give_each_text_as_it_comes_alone(writer: Callable[[str], Writer], kind: str) -> None:
    """The same uniform numbers, one text at a time through the model as the library wrote it."""
    its = writer(kind)
    # A token that is drawn now and then ends texts, so that slots are freed at different times.
    sampled = its.write(its.in_step(), 14, _requests(its, 14), end=-1)
    tokens = [token for text in sampled for token in text.tokens]
    end = max(set(tokens), key=tokens.count)
    slots = its.slots(5)
    assert slots.refills
    together = its.write(slots, 5, _requests(its, 14), end=end)
    alone = [its.write(its.in_step(), 1, [request], end=end)[0] for request in _requests(its, 14)]
    assert together == alone
    assert {text.ended for text in together} == {True, False}
    assert len({len(text.tokens) for text in together}) > 3


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "bart", "t5"])
def test_sampled_tokens_follow_the_models_own_nucleus(writer: Callable[[str], Writer], kind: str) -> None:
    """First tokens, and second ones after the most frequent first, against probabilities of a plain forward pass."""
    its, top_p = writer(kind), 0.8
    prompt = its.prompts[1]
    # A quarter of the tokens or so in the nucleus, whatever the random weights say.
    temperature = float(its.logits(prompt).std()) / 2
    requests = [Request(p, text_key(i), 2) for i in range(1500) for p in (prompt, its.prompts[4])]
    texts = its.write(its.slots(64), 64, requests, temperature, top_p, end=-1)[::2]
    first = torch.tensor([text.tokens[0] for text in texts])
    exact = nucleus(its.logits(prompt) / temperature, top_p)
    assert pvalue(first, exact) > 1e-4
    assert pvalue(first, nucleus(its.logits(prompt) / temperature, 0.7)) < 1e-9, "the twin: another nucleus"
    assert pvalue(first, nucleus(its.logits(its.prompts[2]) / temperature, top_p)) < 1e-9, "the twin: another prompt"
    usual = int(first.mode().values)
    second = torch.tensor([text.tokens[1] for text in texts if text.tokens[0] == usual])
    assert pvalue(second, nucleus(its.logits(prompt, usual) / temperature, top_p)) > 1e-4


@pytest.mark.parametrize("kind", FAMILIES)
def test_greedy_texts_are_the_librarys_own(writer: Callable[[str], Writer], kind: str) -> None:
    its = writer(kind)
    requests = [Request(prompt, 0, LONGEST) for prompt in its.prompts]
    ours = its.write(its.slots(4), 4, requests, temperature=1e-4, top_p=1e-6)
    for prompt, text in zip(its.prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            theirs = its.plain.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=LONGEST,
                pad_token_id=its.tokenizer.pad_token_id,
            )[0].tolist()  # fmt: skip
        # An encoder-decoder gives the token that its decoder starts with, a causal model the prompt.
        theirs = theirs[1:] if kind in ENCODER_DECODER else theirs[len(prompt) :]
        end = its.tokenizer.eos_token_id
        assert list(text.tokens) == (theirs[: theirs.index(end)] if end in theirs else theirs)
        assert text.ended == (end in theirs)


@pytest.mark.parametrize("kind", ["llama", "bart"])
def test_bfloat16_models_run_in_slots_and_follow_their_own_nucleus(tiny: Callable[[str], Path], kind: str) -> None:
    its = Writer(tiny(kind), "bfloat16")
    prompt, slots = its.prompts[1], its.slots(64)
    assert slots.refills
    temperature = float(its.logits(prompt).float().std()) / 2
    texts = its.write(slots, 64, [Request(prompt, text_key(i), 1) for i in range(1500)], temperature, 0.8, end=-1)
    first = torch.tensor([text.tokens[0] for text in texts])
    # The rounding of bfloat16 moves tokens in and out at the nucleus' rim.
    exact = nucleus(its.logits(prompt).float() / temperature, 0.8)
    assert exact[first].eq(0).float().mean() < 0.02
    assert pvalue(first[exact[first] > 0], exact) > 1e-4


@pytest.mark.parametrize("kind", ["llama", "bart"])
def test_texts_in_step_are_the_same_ones(writer: Callable[[str], Writer], kind: str) -> None:
    """A padded batch that waits for its longest text: slower, nothing else."""
    its = writer(kind)
    alone = [its.write(its.in_step(), 1, [request])[0] for request in _requests(its, 20)]
    assert its.write(its.in_step(), 8, _requests(its, 20)) == alone


def test_more_texts_may_be_asked_for_after_one_was_given(writer: Callable[[str], Writer]) -> None:
    its = writer("llama")
    engine = Engine(its.slots(4), 4, -1, 1.0, 0.95, torch.device("cpu"))
    waiting, given = _requests(its, 3), list[Continued]()
    texts = engine.texts(lambda: waiting.pop() if waiting else None, LONGEST)
    for text in texts:
        given.append(text)
        waiting += _requests(its, 2) if len(given) == 3 else []
    assert len(given) == 5
    assert list(engine.texts(lambda: None, LONGEST)) == []


def test_a_text_ends_where_the_models_context_does(writer: Callable[[str], Writer]) -> None:
    """GPT-2 has no position after its last."""
    its = writer("gpt2")
    slots = slots_for(its.merged, its.architecture, [*its.prompts, [5] * (CONTEXT - 3)], 4)
    assert slots.refills
    requests = [Request([5] * (CONTEXT - 3), 0, 3), Request(its.prompts[0], 1, LONGEST)]
    texts = its.write(slots, 4, requests, end=-1)
    assert [len(text.tokens) for text in texts] == [3, LONGEST]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bart", "t5"])
def test_a_model_that_slots_would_get_wrong_is_run_in_step(
    tiny: Callable[[str], Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions that are one off: no error anywhere, only other logits. They are noticed before a text is written."""
    real = model_slots.ModelSlots.begin

    def begin(self: model_slots.ModelSlots, prompts: dict[int, Sequence[int]]) -> None:
        real(self, prompts)
        self._positions[list(prompts)] += 1

    monkeypatch.setattr(model_slots.ModelSlots, "begin", begin)
    its = Writer(tiny(kind))
    slots = its.slots(4)
    assert isinstance(slots, InStep)
    alone = [its.write(its.in_step(), 1, [request])[0] for request in _requests(its, 6)]
    assert its.write(slots, 3, _requests(its, 6)) == alone


def test_a_model_that_keeps_something_else_is_run_in_step(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def contents(*_: object) -> None:
        raise UnsuitableModelError("a state of another kind")

    monkeypatch.setattr(model_slots.ModelSlots, "_contents", contents)
    its = Writer(tiny("qwen2"))
    slots = its.slots(4)
    assert isinstance(slots, InStep)
    alone = [its.write(its.in_step(), 1, [request])[0] for request in _requests(its, 3)]
    assert its.write(slots, 3, _requests(its, 3)) == alone


def test_kept_prompts_are_few_and_a_forgotten_one_is_read_again(
    writer: Callable[[str], Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    its = writer("llama")
    expected = its.write(its.slots(3), 3, _requests(its, 20))
    monkeypatch.setattr(model_slots, "PROMPTS_KEPT", 2)
    slots = its.slots(3)
    assert its.write(slots, 3, _requests(its, 20)) == expected
    assert len(slots._kept) == 2
