"""The generator: losses are exact sums over a large vocabulary, and a model that doesn't fit is one clear sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.pytorch_utils import Conv1D

from common.codes import ControlCodes
from common.errors import ModelError
from common.models import generator as module
from common.models.generator import Batch, Generator, document_losses, fast_bfloat16, load_saved
from common.study import Study
from tests.hospitals import small_study
from tests.tiny_model import CONTEXT, ENCODER_DECODER, FAMILIES

Tiny = Callable[[str], Path]

VOCABULARY = 50_000
BATCH = Batch([[1], [2, 3]], [list(range(10, 18)), list(range(20, 26))])


def test_a_tokens_loss_loses_no_digits_to_the_size_of_the_vocabulary() -> None:
    """Its gradient with respect to the logits sums to zero over the vocabulary."""
    torch.manual_seed(0)
    logits = (5 * torch.randn(*BATCH.targets.shape, VOCABULARY)).requires_grad_(True)
    document_losses(lambda **_: SimpleNamespace(logits=logits), BATCH).sum().backward()  # type: ignore[arg-type]
    assert logits.grad is not None
    assert logits.grad.double().sum(-1).abs().max() < 3e-6


def test_a_strided_vocabulary_would_lose_them() -> None:
    """Twin: cross entropy with the classes in the middle, as its documentation shows it."""
    torch.manual_seed(0)
    logits = (5 * torch.randn(*BATCH.targets.shape, VOCABULARY)).requires_grad_(True)
    targets = BATCH.targets
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    (losses.sum(1) / (targets >= 0).sum(1)).sum().backward()
    assert logits.grad is not None
    assert logits.grad.double().sum(-1).abs().max() > 3e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_equal_a_reference_in_double_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(*BATCH.targets.shape, VOCABULARY).to(dtype)
    found = document_losses(lambda **_: SimpleNamespace(logits=logits), BATCH)  # type: ignore[arg-type]
    log_p, targets = torch.log_softmax(logits.double(), dim=-1), BATCH.targets
    picked = log_p.gather(2, targets.clamp(min=0)[..., None])[..., 0] * (targets >= 0)
    expected = -picked.sum(1) / (targets >= 0).sum(1)
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-6)


# Models and adapters that don't fit


def _generator(base: Path, **options: Any) -> Generator:
    return Generator(Study.model_validate(small_study(base, generator=options)).generator)


@pytest.fixture
def copied(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def _edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("kind", FAMILIES)
def test_more_tokens_than_the_context_are_refused(tiny: Tiny, kind: str) -> None:
    if kind.startswith("t5"):
        assert _generator(tiny(kind), max_tokens=4 * CONTEXT).room([1]) == 4 * CONTEXT, "its positions are relative"
        return
    assert _generator(tiny(kind), max_tokens=CONTEXT).architecture.context == CONTEXT
    with pytest.raises(ModelError, match=rf"max_tokens is {CONTEXT + 1}, but the context .* is {CONTEXT} tokens"):
        _generator(tiny(kind), max_tokens=CONTEXT + 1)


@pytest.mark.parametrize("kind", ["llama", "bart", "t5"])
def test_a_prompt_that_fills_the_context_is_refused(tiny: Tiny, kind: str) -> None:
    generator = _generator(tiny(kind))
    codes = {"preamble": "", "attributes": [{"name": "topic", "values": ["staff", "no " * CONTEXT + "no"]}]}
    if kind == "t5":
        assert len(generator.prompts(ControlCodes.model_validate(codes))) == 2
        return
    with pytest.raises(ModelError, match=r"longest prompt has \d+ tokens, which fills the context"):
        generator.prompts(ControlCodes.model_validate(codes))


def test_quantised_weights_are_refused(copied: Path) -> None:
    _edit(copied / "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    with pytest.raises(ModelError, match="its weights are quantised"):
        _generator(copied)


@pytest.mark.parametrize("values", [{"hidden_size": "many"}, {"num_attention_heads": 5}, {"model_type": "unheard of"}])
def test_a_configuration_that_makes_no_sense_is_refused(copied: Path, values: dict[str, Any]) -> None:
    _edit(copied / "config.json", **values)
    with pytest.raises(ModelError, match=r"its config\.json is none"):
        _generator(copied)


def test_code_that_comes_with_a_model_is_not_run(copied: Path) -> None:
    _edit(copied / "config.json", model_type="own", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.M"})
    (copied / "own.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(ModelError, match="is never run"):
        _generator(copied)


def test_weights_that_are_only_there_pickled_are_refused(copied: Path) -> None:
    torch.save(load_file(copied / "model.safetensors"), copied / "pytorch_model.bin")
    assert _generator(copied).model is not None, "beside safe ones they are left alone"
    (copied / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"pickled \(pytorch_model\.bin\)"):
        _generator(copied)
    save_file({"x": torch.zeros(1)}, copied / "other.safetensors")
    with pytest.raises(ModelError, match="no language model can be loaded"):
        _generator(copied)


def test_weights_that_are_not_there_are_not_drawn(copied: Path) -> None:
    weights = load_file(copied / "model.safetensors")
    lacking = {name: value for name, value in weights.items() if "layers.1.mlp" not in name}
    save_file(lacking, copied / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 3 of the model's weights, such as 'model\.layers\.1\.mlp\.down_proj"):
        _generator(copied)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("left", [0, 0.5, "nonsense"])
def test_a_damaged_file_is_one_sentence(copied: Path, file: str, left: float | str) -> None:
    data = (copied / file).read_bytes()
    (copied / file).write_bytes(left.encode() if isinstance(left, str) else data[: int(left * len(data))])
    with pytest.raises(ModelError, match=r"generator\.base"):
        _generator(copied)


@pytest.mark.parametrize(
    ("kind", "target", "said"),
    [
        ("gpt2", "lm_head", r"'lm_head' is tied to 'transformer\.wte\.weight'"),
        ("gemma3", "lm_head", r"'lm_head' is tied to 'model\.embed_tokens\.weight'"),
        ("bart", "lm_head", r"'lm_head' is tied to 'model\.shared\.weight'"),
        ("llama", "embed_tokens", r"'model\.embed_tokens' is a Embedding; linear layers"),
        ("llama", "c_attn", r"target_modules is \['c_attn'\]: no layer of .* matches"),
    ],
)
def test_a_target_that_takes_no_adapter_is_refused(tiny: Tiny, kind: str, target: str, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        _generator(tiny(kind), target_modules=[target])


def test_a_head_of_its_own_takes_one(tiny: Tiny) -> None:
    """Twin: it is the tie that is refused. The tiny Llama's head isn't tied."""
    assert len(_generator(tiny("llama"), target_modules=["lm_head"]).trained) == 1


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("llama", {"q_proj", "v_proj"}), ("gpt2", {"c_attn"}), ("gemma3", {"q_proj", "v_proj"}),
        ("gemma2", {"q_proj", "v_proj"}), ("qwen2", {"q_proj", "v_proj"}), ("opt", {"q_proj", "v_proj"}),
        ("bart", {"q_proj", "v_proj"}), ("t5", {"q", "v"}), ("t5-v1.1", {"q", "v"}),
    ],
)  # fmt: skip
def test_attention_is_what_is_usual_for_the_family(tiny: Tiny, kind: str, layers: set[str]) -> None:
    adapted = {
        name.split(".lora_")[0].rpartition(".")[2]
        for name in _generator(tiny(kind), target_modules="attention").trained
    }
    assert adapted == layers


def test_attention_of_an_unknown_family_must_be_named(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "USUAL_TARGETS", {"gpt2": ["c_attn"]})
    with pytest.raises(ModelError, match=r"'llama' model isn't known; name them"):
        _generator(tiny_model, target_modules="attention")


@pytest.mark.parametrize("kind", FAMILIES)
def test_all_linear_is_all_but_the_head(tiny: Tiny, kind: str) -> None:
    generator = _generator(tiny(kind))
    base = generator.architecture.load(tiny(kind))
    linear = {name for name, part in base.named_modules() if isinstance(part, (torch.nn.Linear, Conv1D))}
    adapted = {name.removeprefix("base_model.model.").split(".lora_")[0] for name in generator.travelling}
    assert adapted == linear - {"lm_head"}
    assert len(adapted) >= 8
    if kind in ENCODER_DECODER:
        assert {"encoder", "decoder"} <= {part for name in adapted for part in name.split(".")}


# Where it computes, and in what


@pytest.mark.parametrize(("faster", "expected"), [(0.5, True), (1.0, False), (20.0, False)])
def test_bfloat16_is_taken_where_it_is_measured_to_be_faster(
    monkeypatch: pytest.MonkeyPatch, faster: float, expected: bool
) -> None:
    clock, inner = [0.0], torch.mm

    def timed(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        clock[0] += faster if left.dtype == torch.bfloat16 else 1.0
        return inner(left, right)

    monkeypatch.setattr(torch, "mm", timed)
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])
    assert fast_bfloat16.__wrapped__("cpu") is expected


def test_it_is_measured_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    fast_bfloat16("cpu")
    monkeypatch.setattr(torch, "mm", None)
    fast_bfloat16("cpu")


@pytest.mark.parametrize(
    ("option", "fast", "dtype"),
    [
        ("auto", True, torch.bfloat16), ("auto", False, torch.float32),
        ("float32", True, torch.float32), ("bfloat16", False, torch.bfloat16),
    ],
)  # fmt: skip
def test_auto_is_what_is_fast_here(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, option: str, fast: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(module, "fast_bfloat16", lambda device: fast)
    generator = _generator(tiny_model, dtype=option)
    assert generator.dtype == dtype
    assert {parameter.dtype for parameter in generator.trained.values()} == {torch.float32}


def test_without_a_gpu_auto_is_the_cpu(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _generator(tiny_model).device == torch.device("cpu")


def test_with_a_gpu_auto_is_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert module._device("auto") == torch.device("cuda")
    assert module._device("cpu") == torch.device("cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_gpu_says_what_the_cpu_does(tiny: Tiny, kind: str) -> None:
    options = Study.model_validate(small_study(tiny(kind))).generator
    losses = []
    for device in ("cpu", "cuda"):
        generator = Generator(options, device=device)
        generator.load_adapter({name: value + np.float32(0.01) for name, value in generator.adapter().items()})
        losses.append(document_losses(generator.model, generator.batch([[3, 4]], [[5, 6, 7]])).item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("kind", ["llama", "bart"])
def test_a_saved_adapter_loads_elsewhere(tiny: Tiny, tmp_path: Path, kind: str) -> None:
    generator = _generator(tiny(kind))
    generator.load_adapter({name: value + np.float32(0.01) for name, value in generator.adapter().items()})
    generator.save_adapter(tmp_path)
    again = load_saved(str(tiny(kind)), tmp_path).eval()
    batch = generator.batch([[3, 4]], [[5, 6, 7]])
    generator.model.eval()
    with torch.no_grad():
        assert torch.equal(again(**batch.inputs).logits, generator.model(**batch.inputs).logits)
