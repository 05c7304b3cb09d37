"""How causal and encoder-decoder models read a prompt and a text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.errors import ModelError
from common.models import architectures, generator
from common.models.architectures import IGNORED, Architecture, Batch, Causal, EncoderDecoder, architecture_of
from common.models.generator import Generator
from common.study import Study
from tests.hospitals import small_study
from tests.tiny_model import CAUSAL, ENCODER_DECODER, FAMILIES

Tiny = Callable[[str], Path]

PROMPTS, TEXTS = [[3, 4, 5], [6]], [[11, 12], [21, 22, 23, 24]]


def _generator(base: Path, **options: object) -> Generator:
    return Generator(Study.model_validate(small_study(base, generator=options)).generator)


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_configuration_says_which_it_is(tiny: Tiny, kind: str) -> None:
    assert type(_generator(tiny(kind)).architecture) is (Causal if kind in CAUSAL else EncoderDecoder)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_causal_model_goes_on_after_a_blank(tiny: Tiny, kind: str) -> None:
    made = _generator(tiny(kind), max_tokens=48)
    (ids,) = made.encode(["The staff were kind."], [48])
    assert ids[-1] == made.tokenizer.eos_token_id
    assert made.tokenizer.decode(ids[:-1]) == " The staff were kind."
    assert made.room(PROMPTS[0]) == 48 - 3
    assert made.encode(["The staff were kind."], [3]) == [ids[:3]], "a cut text has no end"
    assert made.encode(["The staff were kind."], [-2]) == [[]]


@pytest.mark.parametrize(("kind", "beginning"), [("bart", ["<s>"]), ("t5", [])])
def test_an_encoder_decoder_has_its_tokenizers_own_special_tokens(tiny: Tiny, kind: str, beginning: list[str]) -> None:
    made = _generator(tiny(kind), max_tokens=48)
    (ids,) = made.encode(["The staff were kind."], [48])
    tokens = made.tokenizer.convert_ids_to_tokens(ids)
    assert tokens[: len(beginning)] == beginning
    assert tokens[-1] == "</s>"
    assert made.tokenizer.decode(ids, skip_special_tokens=True) == "The staff were kind."
    assert made.room(PROMPTS[0]) == 48, "the prompt is the encoder's"
    assert made.encode(["The staff were kind."], [3]) == [ids[:3]]


def test_an_encoder_decoder_whose_tokenizer_adds_no_end_gets_one(tiny: Tiny) -> None:
    made = _generator(tiny("t5"))
    made.tokenizer.backend_tokenizer.post_processor = None
    (ids,) = made.encode(["The staff were kind."], [48])
    assert ids.count(made.tokenizer.eos_token_id) == 1
    assert ids[-1] == made.tokenizer.eos_token_id


@pytest.mark.parametrize("kind", ["llama", "bart"])
def test_no_texts_are_no_tokens(tiny: Tiny, kind: str) -> None:
    assert _generator(tiny(kind)).encode([], []) == []


def test_a_causal_batch_predicts_the_text_from_what_comes_before() -> None:
    batch = Batch(PROMPTS, TEXTS)
    assert batch.inputs["input_ids"].tolist() == [[3, 4, 5, 11, 12], [6, 21, 22, 23, 24]]
    assert batch.inputs["attention_mask"].tolist() == [[1] * 5] * 2
    assert batch.targets.tolist() == [
        [IGNORED, IGNORED, 11, 12, IGNORED],
        [21, 22, 23, 24, IGNORED],
    ]
    assert (batch.documents, batch.positions) == (2, {5})


def test_padding_of_a_causal_batch_is_masked() -> None:
    batch = Batch([[3], [4, 5, 6], []], [[], [7], [8, 9]])
    assert batch.inputs["attention_mask"].tolist() == [[1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch.targets.tolist() == [[IGNORED] * 4, [IGNORED, IGNORED, 7, IGNORED], [9, *[IGNORED] * 3]]


def test_an_encoder_decoder_batch_reads_the_text_one_token_late(tiny: Tiny) -> None:
    made = _generator(tiny("t5"))
    start = made.model.config.decoder_start_token_id
    batch = made.batch([*PROMPTS, [7]], [*TEXTS, []])
    assert batch.inputs["input_ids"].tolist() == [[3, 4, 5], [6, 0, 0], [7, 0, 0]]
    assert batch.inputs["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 0, 0]]
    assert batch.inputs["decoder_input_ids"][1].tolist() == [start, 21, 22, 23]
    assert batch.inputs["decoder_attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    assert batch.targets.tolist() == [[11, 12, IGNORED, IGNORED], TEXTS[1], [IGNORED] * 4]
    assert (batch.documents, batch.positions) == (3, {3, 4})


@pytest.mark.parametrize("kind", ENCODER_DECODER)
def test_its_loss_is_the_librarys_for_a_single_document(tiny: Tiny, kind: str) -> None:
    """The library shifts the text by itself; ours is shifted by us."""
    made = _generator(tiny(kind))
    made.model.eval()
    with torch.no_grad():
        ours = generator.document_losses(made.model, made.batch(PROMPTS[:1], TEXTS[:1]))[0]
        theirs = made.model(input_ids=torch.tensor(PROMPTS[:1]), labels=torch.tensor(TEXTS[:1])).loss
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ["llama", "bart"])
def test_a_batch_goes_to_a_device_whole(tiny: Tiny, kind: str) -> None:
    batch = _generator(tiny(kind)).batch(PROMPTS, TEXTS).to("meta")
    assert {tensor.device.type for tensor in (*batch.inputs.values(), batch.targets)} == {"meta"}


def test_an_encoder_decoder_without_a_first_token_is_refused() -> None:
    config = SimpleNamespace(is_encoder_decoder=True, get_text_config=SimpleNamespace)
    with pytest.raises(ModelError, match="decoder_start_token_id"):
        architecture_of(config)(config, None)


def test_another_kind_is_one_class_and_its_registration(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reversed(Causal):
        @classmethod
        def fits(cls, config: Any) -> bool:
            return bool(config.model_type == "gpt2")

        def batch(self, prompts: Any, texts: Any) -> Batch:
            return Batch(prompts, [text[::-1] for text in texts])

    kinds: tuple[type[Architecture], ...] = (Reversed, *architectures.ARCHITECTURES)
    monkeypatch.setattr(architectures, "ARCHITECTURES", kinds)
    assert _generator(tiny("gpt2")).batch([[3]], [[1, 2]]).targets.tolist() == [[2, 1, IGNORED]]
    assert _generator(tiny("llama")).batch([[3]], [[1, 2]]).targets.tolist() == [[1, 2, IGNORED]]
