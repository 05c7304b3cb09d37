"""A document's gradient is that document's, whichever way it is computed, and nothing exact outlives the call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from client_strong import fused
from client_strong.fused import FusedGradients
from client_strong.gradient_check import GRADIENTS, check_gradients
from client_strong.gradients import Gradient, OpacusGradients, PerSampleGradients, Slots
from common.errors import ModelError
from common.models.architectures import architecture_of
from common.models.generator import Batch, Generator, document_losses
from common.study import Study
from tests.hospitals import small_study

PROMPTS = [[1, 2, 3], [4], [5, 6], [7, 8]]
TEXTS = [[11, 12, 13, 14, 15], [21] * 40, [31, 32], list(range(40, 61))]

Make = Callable[..., Generator]


@pytest.fixture(params=["llama", "gpt2"])
def make(request: pytest.FixtureRequest, tiny_model: Path, tiny_gpt2: Path) -> Make:
    base = tiny_model if request.param == "llama" else tiny_gpt2
    return lambda **options: _generator(base, **options)


@pytest.fixture
def llama(tiny_model: Path) -> Generator:
    return _generator(tiny_model, lora="plain")


def _generator(base: Path, **options: Any) -> Generator:
    generator = Generator(Study.model_validate(small_study(base, generator=options)).generator)
    _warm(generator)
    return generator


def _warm(generator: Generator) -> None:
    """B starts at zero, where the gradients of A vanish; move away from it."""
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in generator.trained.items():
            parameter.normal_(std=0.02 if "lora_B" in name else 0.2, generator=noise)


def _batch(*documents: int) -> Batch:
    chosen = documents or range(len(TEXTS))
    return Batch([PROMPTS[i] for i in chosen], [TEXTS[i] for i in chosen])


def _alone(generator: Generator) -> list[np.ndarray]:
    """By autograd, without a line of the code under test."""
    gradients = []
    for index in range(len(TEXTS)):
        generator.model.zero_grad()
        document_losses(generator.model, _batch(index)).sum().backward()
        # A parameter that no document reaches has no gradient.
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in generator.trained.values()]
        gradients.append(torch.cat([p.reshape(-1) for p in parts]).numpy())
    generator.model.zero_grad()
    return gradients


def _apart(one: Any, other: Any) -> float:
    pairs = list(zip(one, other, strict=True))
    assert all(np.linalg.norm(b) > 0 for _, b in pairs)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


def batch_mean(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """What a library's loss is: the mean over all tokens of the batch."""
    logits = model(**batch.inputs, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    return loss.expand(batch.documents)


# Equal to what it should be


@pytest.mark.parametrize("rank", [1, 8])
@pytest.mark.parametrize("lora", ["ffa", "plain"])
def test_fused_opacus_and_one_document_at_a_time_are_equal(make: Make, lora: str, rank: int) -> None:
    generator = make(lora=lora, rank=rank)
    fused, expected = list(FusedGradients(generator)(_batch())), _alone(generator)
    assert all(gradient.shape == (FusedGradients(generator).dimension,) for gradient in fused)
    assert _apart(fused, expected) < 1e-5
    assert _apart(OpacusGradients(generator)(_batch()), expected) < 1e-5
    assert _apart(FusedGradients(generator, checkpointing=True)(_batch()), fused) < 1e-5


def test_each_parameter_is_equal_also_where_it_is_a_small_part(make: Make) -> None:
    generator = make(lora="plain", rank=4)
    for gradient, expected in zip(FusedGradients(generator)(_batch()), _alone(generator), strict=True):
        start = 0
        for name, parameter in generator.trained.items():
            part = slice(start, start := start + parameter.numel())
            assert np.linalg.norm(gradient[part] - expected[part]) < 1e-4 * np.linalg.norm(expected[part]), name


@pytest.mark.parametrize("lora", ["ffa", "plain"])
def test_bfloat16_is_equal_up_to_its_rounding(make: Make, lora: str) -> None:
    generator = make(lora=lora, rank=8, dtype="bfloat16")
    gradients = list(FusedGradients(generator)(_batch()))
    assert all(gradient.dtype == np.float32 for gradient in gradients)
    assert _apart(gradients, _alone(generator)) < 0.03
    assert _apart(FusedGradients(generator, checkpointing=True)(_batch()), gradients) < 1e-5


def test_an_adapter_far_below_a_bfloat16_weight_is_still_seen(tiny_model: Path) -> None:
    """As in the first steps: one of a thousandth of the weights, which a merged weight in bfloat16 rounds away."""
    generator = _generator(tiny_model, rank=8, dtype="bfloat16")
    layer = FusedGradients(generator)._layers[0]
    samples = fused._Samples(Slots.of(generator.trained), 1, {1}, torch.device("cpu"))
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.b.fill_(1e-4)
        layer.a.fill_(1.0)
        # The base's outputs cancel, the adapter's don't, if one of them sees the inputs differently.
        x = torch.ones(1, 1, 32, dtype=torch.bfloat16)
        layer.weight[:, ::2] = -1.0
        expected = layer.module(x)
        assert _apart(fused._fused_forward(layer, samples, x).float().numpy(), expected.float().numpy()) < 0.01
        merged = layer.weight + (layer.scaling * layer.b @ layer.a).to(torch.bfloat16)
        assert torch.equal(x @ merged.t(), torch.zeros_like(expected)), "twin: merged, it is lost"


@pytest.mark.parametrize("alpha", [1.0, 32.0])
def test_the_scaling_is_in_the_gradient(make: Make, alpha: float) -> None:
    generator = make(lora="plain", rank=2, alpha=alpha)
    assert _apart(FusedGradients(generator)(_batch()), _alone(generator)) < 1e-5


def test_part_of_the_adapter_may_be_frozen(llama: Generator) -> None:
    """A of one layer, B of another, all of a third, none of the others."""
    for name, parameter in llama.model.named_parameters():
        parameter.requires_grad_(
            ("layers.0.self_attn.q_proj.lora_A" in name)
            or ("layers.1.mlp.up_proj.lora_B" in name)
            or ("layers.1.self_attn.v_proj.lora" in name)
        )
    assert len(llama.trained) == 4
    assert _apart(FusedGradients(llama)(_batch()), _alone(llama)) < 1e-5


def test_a_layer_used_twice_adds_up_and_one_that_is_not_reached_is_zero(llama: Generator) -> None:
    layers = llama.model.get_base_model().model.layers
    layers[1].mlp.up_proj = layers[1].mlp.gate_proj
    unreached = layers[1].self_attn
    layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    gradients = FusedGradients(llama)
    fused = list(gradients(_batch()))
    assert _apart(fused, _alone(llama)) < 1e-5
    start = 0
    for parameter in llama.trained.values():
        part = slice(start, start := start + parameter.numel())
        outside = all(parameter is not p for p in unreached.parameters())
        assert all(gradient[part].any() == outside for gradient in fused)


def test_flattened_inputs_and_bias_and_rslora_are_known() -> None:
    """Layers that see ``(documents * tokens, features)``, as in OPT, with a bias, and with peft's other scaling."""

    config = LlamaConfig(
        vocab_size=80, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    torch.manual_seed(0)
    base = LlamaForCausalLM(config)
    for name, parameter in base.named_parameters():
        parameter.requires_grad_(False)
        if name.endswith("bias"):
            parameter.data.normal_()
    for layer in base.model.layers:
        _flatten(layer.mlp)
    generator = _around(
        get_peft_model(base, LoraConfig(r=4, use_rslora=True, target_modules="all-linear", task_type="CAUSAL_LM"))
    )
    assert FusedGradients(generator)._layers[0].scaling == 8 / 2
    assert _apart(FusedGradients(generator)(_batch()), _alone(generator)) < 1e-5


def _flatten(mlp: Any) -> None:
    inner = mlp.forward
    mlp.forward = lambda x: inner(x.reshape(-1, x.shape[-1])).view(x.shape)


def _around(model: Any) -> Generator:
    generator = Generator.__new__(Generator)
    generator.model, generator.tokenizer = model, None
    generator.options = Study.model_validate(small_study(Path("made"), generator={"lora": "plain"})).generator
    generator.architecture = architecture_of(model.config)(model.config, None)
    _warm(generator)
    return generator


def test_losses_of_ones_own_are_used(llama: Generator) -> None:
    def doubled(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return 2 * document_losses(model, batch)

    assert _apart(FusedGradients(llama, doubled)(_batch()), [2 * g for g in _alone(llama)]) < 1e-5


def test_a_model_that_scales_its_logits_gets_the_plain_loss(llama: Generator) -> None:
    assert FusedGradients(llama)._losses is not document_losses
    base = llama.model.get_base_model()
    inner = base.forward

    def capped(*args: Any, **kwargs: Any) -> Any:
        output = inner(*args, **kwargs)
        output.logits = 0.1 * torch.tanh(output.logits / 0.1)
        return output

    base.forward = capped
    gradients = FusedGradients(llama)
    assert gradients._losses is document_losses
    assert _apart(gradients(_batch()), _alone(llama)) < 1e-5


def test_a_document_without_a_token_has_no_gradient(llama: Generator) -> None:
    with_empty = Batch([*PROMPTS, [1, 2]], [*TEXTS, []])
    *gradients, empty = FusedGradients(llama)(with_empty)
    assert not empty.any()
    assert _apart(gradients, _alone(llama)) < 1e-5


def test_memory_is_one_number_per_document_and_parameter(llama: Generator) -> None:
    gradients = FusedGradients(llama)
    rows = list(gradients(_batch()))
    assert {row.dtype for row in rows} == {np.dtype(np.float32)}
    places = [row.__array_interface__["data"][0] for row in rows]
    assert set(np.diff(places)) == {4 * gradients.dimension}, "rows of one array, not copies"


# Refused


def test_modules_to_save_are_refused(tiny_model: Path) -> None:
    base = _generator(tiny_model).model.unload()
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    with pytest.raises(ModelError, match=r"lm_head.modules_to_save.* \(one of modules_to_save\) is trained"):
        FusedGradients(_around(get_peft_model(base, config)))


def test_dropout_is_refused(tiny_model: Path) -> None:
    base = _generator(tiny_model).model.unload()
    config = LoraConfig(target_modules=["q_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    with pytest.raises(ModelError, match=r"q_proj.*dropout of 0\.1"):
        FusedGradients(_around(get_peft_model(base, config)))


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj"], "use_dora": True},
        {"target_modules": ["q_proj"], "lora_bias": True},
        {"target_modules": ["embed_tokens"]},
    ],
    ids=lambda options: str(list(options.items())[-1]),
)
def test_adapters_that_are_not_plain_lora_are_refused(tiny_model: Path, options: dict[str, Any]) -> None:
    base = _generator(tiny_model).model.unload()
    with pytest.raises(ModelError, match=r"layer 'base_model\.model\.model\..*(q_proj|embed_tokens)'"):
        FusedGradients(_around(get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **options))))


def test_a_layer_of_another_kind_is_refused(llama: Generator) -> None:
    class Quantised(torch.nn.Linear):
        pass

    llama.model.get_base_model().model.layers[0].mlp.up_proj.base_layer = Quantised(32, 64, bias=False)
    with pytest.raises(ModelError, match="up_proj' is a Linear around a Quantised"):
        FusedGradients(llama)


def test_a_trained_weight_of_the_base_is_refused_by_name(llama: Generator) -> None:
    llama.model.get_base_model().model.norm.weight.requires_grad_(True)
    with pytest.raises(ModelError, match=r"'base_model\.model\.model\.norm\.weight' is trained but is no A or B"):
        FusedGradients(llama)


def test_a_merged_adapter_is_refused(llama: Generator) -> None:
    llama.model.merge_adapter()
    with pytest.raises(ModelError, match="unmerged"):
        FusedGradients(llama)


def test_rows_of_unknown_documents_are_refused(llama: Generator) -> None:
    """A layer that sees some of the tokens, as an expert does."""
    mlp = llama.model.get_base_model().model.layers[1].mlp
    inner = mlp.forward

    def routed(x: torch.Tensor) -> torch.Tensor:
        some = x.reshape(-1, x.shape[-1])[3:]
        return x + torch.nn.functional.pad(inner(some), (0, 0, 3, 0)).view(x.shape)

    mlp.forward = routed
    gradients = FusedGradients(llama)
    with pytest.raises(ModelError, match=r"in a batch of 4 documents of 41 tokens"):
        next(gradients(_batch()))
    _check_nothing_is_left(llama)


# Nothing is left


def _state(model: Any) -> list[tuple[str, list[str], bool, list[object]]]:
    """What a module holds: attributes, mode, hooks."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [
        (name, sorted(vars(m)), m.training, [list(getattr(m, hook)) for hook in hooks])
        for name, m in model.named_modules()
    ]


def _check_nothing_is_left(generator: Generator) -> None:
    for parameter in generator.model.parameters():
        assert parameter.grad is None
        assert not any(isinstance(value, torch.Tensor) for value in vars(parameter).values())
        assert "_forward_counter" not in vars(parameter)
    for part in generator.model.modules():
        assert "forward" not in vars(part) or vars(part)["forward"].__module__ == __name__
        assert not any(isinstance(value, torch.Tensor) for value in vars(part).values())
        assert "activations" not in vars(part)
        assert not getattr(part, "gradient_checkpointing", False)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_nothing_is_left_on_the_model(make: Make, checkpointing: bool) -> None:
    generator = make(lora="plain")
    generator.model.eval()
    before, adapter = _state(generator.model), generator.adapter()
    gradients = FusedGradients(generator, checkpointing=checkpointing)
    assert _state(generator.model) == before
    first = gradients(_batch())
    next(first)
    assert _state(generator.model) == before, "as soon as there is a gradient to clip"
    _check_nothing_is_left(generator)
    check_gradients(generator, gradients)
    assert _state(generator.model) == before
    assert all(np.array_equal(adapter[name], value) for name, value in generator.adapter().items())


class _Broken(RuntimeError):
    pass


class _BreaksBackwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        raise _Broken


@pytest.mark.parametrize("name", sorted(GRADIENTS))
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_nothing_is_left_after_an_exception(llama: Generator, name: str, where: str) -> None:
    gradients = GRADIENTS[name](llama)
    layer = llama.model.get_base_model().model.layers[1].mlp
    inner = layer.forward

    def broken(x: torch.Tensor) -> torch.Tensor:
        if where == "forward":
            inner(x)
            raise _Broken
        return _BreaksBackwards.apply(inner(x))

    layer.forward = broken
    llama.model.train()
    before = _state(llama.model)
    with pytest.raises(_Broken):
        next(gradients(_batch()))
    assert _state(llama.model) == before
    _check_nothing_is_left(llama)
    layer.forward = inner
    assert _apart(gradients(_batch()), _alone(llama)) < 1e-5


# The self-test


@pytest.mark.parametrize("name", sorted(GRADIENTS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [1, 8])
def test_the_self_test_accepts_what_is_right(make: Make, name: str, dtype: str, rank: int) -> None:
    generator = make(lora="plain", dtype=dtype, rank=rank)
    check_gradients(generator, GRADIENTS[name](generator))
    check_gradients(generator, GRADIENTS[name](generator), TEXTS)


class _Wrong(PerSampleGradients):
    """A right implementation whose gradients a function then spoils."""

    def __init__(self, generator: Generator, spoil: Callable[[np.ndarray], np.ndarray]) -> None:
        self._inner, self._spoil = FusedGradients(generator), spoil

    @property
    def dimension(self) -> int:
        return self._inner.dimension

    def __call__(self, batch: Batch) -> Iterator[Gradient]:
        yield from self._spoil(np.array(list(self._inner(batch))))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda rows: np.broadcast_to(rows.sum(axis=0), rows.shape),
        lambda rows: np.broadcast_to(rows.mean(axis=0), rows.shape),
        lambda rows: rows[::-1],
        lambda rows: rows / 2,
        lambda rows: rows * np.nan,
        lambda rows: rows[:-1],
        lambda rows: rows[:, :-1],
    ],
    ids=["summed", "averaged", "in another order", "without the scaling", "not a number", "one short", "cut"],
)
def test_the_self_test_refuses_what_is_wrong(
    tiny_model: Path, spoil: Callable[[np.ndarray], np.ndarray], dtype: str
) -> None:
    generator = _generator(tiny_model, dtype=dtype, lora="plain")
    with pytest.raises(ModelError, match="refuses to train"):
        check_gradients(generator, _Wrong(generator, spoil))


@pytest.mark.parametrize("letter", ["A", "B"])
def test_the_self_test_sees_one_wrong_parameter_of_a_fresh_adapter(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, letter: str
) -> None:
    """B is zero at first, and with it every gradient of A: the test has to look elsewhere."""
    generator = Generator(Study.model_validate(small_study(tiny_model, generator={"lora": "plain"})).generator)
    add = fused._Samples.add
    name = f"base_model.model.model.layers.0.self_attn.k_proj.lora_{letter}.default.weight"
    wrong = generator.trained[name]

    def without_scaling(
        self: Any, parameter: torch.nn.Parameter, left: torch.Tensor, right: torch.Tensor, scaling: float
    ) -> None:
        add(self, parameter, left, right, 1.0 if parameter is wrong else scaling)

    check_gradients(generator, FusedGradients(generator))
    monkeypatch.setattr(fused._Samples, "add", without_scaling)
    with pytest.raises(ModelError, match=rf"k_proj\.lora_{letter}.*deviates by 0\.[1-9].*refuses to train"):
        check_gradients(generator, FusedGradients(generator))


def test_the_self_test_sees_documents_that_see_each_other(llama: Generator) -> None:
    layer = llama.model.get_base_model().model.layers[0].mlp
    inner = layer.forward
    layer.forward = lambda x: inner(x) + 0.01 * x.mean(dim=0, keepdim=True)
    with pytest.raises(ModelError, match="refuses to train"):
        check_gradients(llama, FusedGradients(llama))


def test_the_self_test_sees_a_losses_that_mixes_documents(llama: Generator) -> None:
    with pytest.raises(ModelError, match="refuses to train"):
        check_gradients(llama, FusedGradients(llama, batch_mean))


def test_the_self_test_notices_an_adapter_that_is_not_part_of_the_output(llama: Generator) -> None:
    for layer in llama.model.get_base_model().model.layers:
        for part in (layer.self_attn, layer.mlp):
            part.forward = _without_adapter(part)
    with pytest.raises(ModelError, match="no loss depends on the adapter"):
        check_gradients(llama, OpacusGradients(llama))


def _without_adapter(module: torch.nn.Module) -> Callable[..., Any]:
    inner = module.forward

    def forward(*arguments: Any, **options: Any) -> Any:
        with torch.no_grad():
            return inner(*arguments, **options)

    return forward


def test_opacus_does_not_recompute(llama: Generator) -> None:
    with pytest.raises(ModelError, match="'fused' ones can"):
        OpacusGradients(llama, checkpointing=True)
