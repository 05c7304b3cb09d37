"""Which factors travel, and which of them a round trains and a site answers with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from common.errors import AdapterMismatchError
from common.models.generator import Generator
from common.models.lora import cycle, trained_names, travelling_names
from common.study import Study
from tests.hospitals import small_study

VARIANTS = ["ffa", "plain", "alternating"]
NAMES = ["m.q.lora_B.default.weight", "m.q.lora_A.default.weight", "m.embed.weight"]
A, B = NAMES[1], NAMES[0]


@pytest.mark.parametrize(
    ("lora", "rounds", "travelling"),
    [("ffa", [[B], [B], [B]], [B]), ("plain", [[A, B]] * 3, [A, B]), ("alternating", [[B], [A], [B]], [A, B])],
)
def test_each_variant_trains_its_factors(lora: str, rounds: list[list[str]], travelling: list[str]) -> None:
    assert [trained_names(lora, NAMES, server_round) for server_round in (1, 2, 3)] == rounds
    assert travelling_names(lora, NAMES) == travelling
    assert rounds[0] == rounds[cycle(lora)]


@pytest.mark.parametrize("kind", ["llama", "t5"])
@pytest.mark.parametrize("lora", VARIANTS)
def test_the_generator_trains_what_the_names_say(tiny: Callable[[str], Path], lora: str, kind: str) -> None:
    generator = _generator(tiny(kind), lora)
    sent = list(generator.adapter())
    assert sent == sorted(sent) == list(generator.travelling)
    assert list(generator.trained) == trained_names(lora, sent, 1), "before any round, as in the first"
    for server_round in (1, 2, 3, 4, 2):
        generator.start_round(server_round)
        assert list(generator.trained) == trained_names(lora, sent, server_round)
        assert list(generator.adapter()) == sent, "what is sent doesn't depend on the round"


def test_alternating_rounds_train_both_factors_in_turn(tiny_model: Path) -> None:
    """Twin of the above: names alone could agree on nothing at all."""
    generator = _generator(tiny_model, "alternating")
    odd = set(generator.trained)
    generator.start_round(2)
    even = set(generator.trained)
    assert odd
    assert even
    assert not odd & even
    assert odd | even == set(generator.travelling)


@pytest.mark.parametrize("lora", VARIANTS)
def test_an_adapter_comes_back_as_it_was_sent(tiny_model: Path, lora: str) -> None:
    sender, receiver = _generator(tiny_model, lora), _generator(tiny_model, lora)
    sent = {name: value + np.float32(0.5) for name, value in sender.adapter().items()}
    receiver.load_adapter(sent)
    assert all(np.array_equal(sent[name], value) for name, value in receiver.adapter().items())
    with pytest.raises(AdapterMismatchError, match=r"lora_B.*missing or unknown"):
        receiver.load_adapter({name: value for name, value in sent.items() if "lora_B" not in name})


@pytest.mark.parametrize("lora", VARIANTS)
def test_the_digest_is_of_what_never_travels(tiny_model: Path, lora: str) -> None:
    one, other = _generator(tiny_model, lora, init_seed=0), _generator(tiny_model, lora, init_seed=1)
    assert one.frozen_sha256() == _generator(tiny_model, lora, init_seed=0).frozen_sha256()
    assert (one.frozen_sha256() != other.frozen_sha256()) == (lora == "ffa"), "elsewhere all of it travels"
    before = one.frozen_sha256()
    one.start_round(2)
    one.load_adapter({name: value + np.float32(1) for name, value in one.adapter().items()})
    assert one.frozen_sha256() == before


def _generator(base: Path, lora: str, **options: object) -> Generator:
    return Generator(Study.model_validate(small_study(base, generator={"lora": lora, **options})).generator)
