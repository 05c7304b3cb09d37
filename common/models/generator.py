"""The generator: a public language model with a LoRA adapter. With `common.models.architectures` all that knows torch.

Strong sites train the adapter, the coordinator averages adapters and samples from the model. What isn't trained of the
adapter every side derives from the study's public seed, so only what is trained travels.
"""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from numpy.typing import NDArray
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL_TARGETS
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer
from transformers.pytorch_utils import Conv1D

from common import study as studies
from common.codes import ControlCodes
from common.errors import AdapterMismatchError, ModelError
from common.models import location, lora
from common.models.architectures import IGNORED, Architecture, Batch, architecture_of
from common.models.conversion import converted
from common.models.manifest import Manifest, check_pinned
from common.protocol import Adapter, adapter_bytes

__all__ = ["Batch", "Generator", "check_adapter", "document_losses", "fast_bfloat16", "load_saved"]

_UNREADABLE = (OSError, ValueError, KeyError, TypeError, StrictDataclassError)
"""What transformers raises at files that aren't what it expects."""

_GAIN = 1.1
"""bfloat16 must be this much faster to be worth its rounding."""

# Bars that are redrawn in place are noise in a log file.
transformers.logging.disable_progress_bar()


class Generator:
    """A base model with its tokenizer and the study's adapter attached.

    Parameters
    ----------
    options
        The study's.
    local
        A site's own places for models: name in the study -> folder.
    device
        Where the model is: 'auto' is the GPU if there is one, else the CPU.

    Attributes
    ----------
    model
        The peft model; its trained parameters are float32.
    tokenizer
        The base model's tokenizer.
    architecture
        How the model reads prompts and texts.

    Raises
    ------
    ModelError
        If the model can't be loaded, isn't the one that the study pins, or doesn't take the study's adapter.
    """

    def __init__(
        self, options: studies.Generator, local: Mapping[str, Path] | None = None, device: str = "auto"
    ) -> None:
        self.options = options
        where = _device(device)
        folder = _verified(options, local or {})
        config = _load_config(folder, options)
        self.tokenizer = _load_tokenizer(folder)
        self.architecture: Architecture = architecture_of(config)(config, self.tokenizer)
        _check_context(self.architecture, options)
        base = _load_base(self.architecture, folder, options, _dtype(options, where))
        # Training keeps no keys and values; sampling asks for them.
        base.config.use_cache = False
        self.model = _attach(base, options, self.architecture.task_type).to(where)
        self.start_round(1)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the frozen base model."""
        dtype: torch.dtype = self.model.get_input_embeddings().weight.dtype
        return dtype

    @property
    def trained(self) -> dict[str, torch.nn.Parameter]:
        """The adapter's parameters that are trained now, by name, in a fixed order."""
        return {name: p for name, p in sorted(self.model.named_parameters()) if p.requires_grad}

    @property
    def travelling(self) -> dict[str, torch.nn.Parameter]:
        """The adapter's parameters that any round trains, by name, in a fixed order: what sites are sent."""
        parameters = self._lora()
        return {name: parameters[name] for name in lora.travelling_names(self.options.lora, parameters)}

    def start_round(self, server_round: int) -> None:
        """Train the factors that a round trains, counted from 1; only with 'alternating' do they differ."""
        parameters = self._lora()
        trained = set(lora.trained_names(self.options.lora, parameters, server_round))
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in trained)

    def adapter(self) -> dict[str, NDArray[np.float32]]:
        """The adapter as sites are sent it, by name."""
        return {name: p.detach().float().cpu().numpy().copy() for name, p in self.travelling.items()}

    def frozen_sha256(self) -> str:
        """Digest of the adapter's part that never travels, in hexadecimal."""
        travelling = self.travelling
        frozen = {n: p.detach().float().cpu().numpy() for n, p in self._lora().items() if n not in travelling}
        return hashlib.sha256(adapter_bytes(frozen)).hexdigest()

    def load_adapter(self, adapter: Adapter) -> None:
        """Put travelled weights into the model.

        Raises
        ------
        AdapterMismatchError
            If names or shapes differ, or a weight isn't finite.
        """
        travelling = self.travelling
        check_adapter(adapter, {name: tuple(p.shape) for name, p in travelling.items()})
        with torch.no_grad():
            for name, parameter in travelling.items():
                parameter.copy_(torch.from_numpy(np.array(adapter[name], dtype=np.float32)))

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter in peft's layout."""
        self.model.save_pretrained(str(folder))

    def prompts(self, codes: ControlCodes) -> list[list[int]]:
        """Token ids of every code's prompt.

        Raises
        ------
        ModelError
            If one fills the model's context.
        """
        prompts: list[list[int]] = [self.tokenizer(codes.prompt(index))["input_ids"] for index in range(len(codes))]
        longest, context = max(prompts, key=len), self.architecture.context
        if context is not None and (len(longest) > context or self.architecture.room(longest, context) < 1):
            raise ModelError(
                f"codes: the longest prompt has {len(longest)} tokens, which fills the context of "
                f"{self.options.base!r} ({context} tokens)"
            )
        return prompts

    def room(self, prompt: Sequence[int]) -> int:
        """Tokens that a text may have after ``prompt``."""
        return self.architecture.room(prompt, self.options.max_tokens)

    def encode(self, texts: Sequence[str], room: Sequence[int]) -> list[list[int]]:
        """Token ids of each text with the end-of-text token, cut to ``room[i]`` tokens. A cut text has no end token."""
        encoded = self.architecture.encode(texts) if texts else []
        return [ids[: max(space, 0)] for ids, space in zip(encoded, room, strict=True)]

    def batch(self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> Batch:
        """Prompts and texts as the model reads them, where the model is."""
        return self.architecture.batch(prompts, texts).to(self.device)

    def _lora(self) -> dict[str, torch.nn.Parameter]:
        return {name: parameter for name, parameter in self.model.named_parameters() if ".lora_" in name}


def check_adapter(adapter: Adapter, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse an adapter that isn't the study's.

    Raises
    ------
    AdapterMismatchError
        Naming the first parameter that is missing, unknown, mis-shaped or not finite.
    """
    if unknown := sorted(set(adapter) ^ set(shapes)):
        raise AdapterMismatchError(
            f"adapter: parameter {unknown[0]!r} is missing or unknown; {len(shapes)} are expected"
        )
    for name, shape in shapes.items():
        if adapter[name].shape != shape:
            raise AdapterMismatchError(f"adapter: {name!r} has shape {adapter[name].shape}; {shape} is expected")
        if not np.isfinite(adapter[name]).all():
            raise AdapterMismatchError(f"adapter: {name!r} holds a weight that isn't finite")


def document_losses(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Per-document loss ``-log p(text | code)``, averaged over the document's own tokens; shape ``(documents,)``.

    A library's ``outputs.loss`` averages over all tokens of the batch: one long document then rescales every other
    document's gradient, and the sensitivity is no longer C. Here a document's loss depends on that document alone.
    """
    logits = model(**batch.inputs, use_cache=False).logits.float()
    # One row a token: along a strided vocabulary, torch adds up 50,000 terms one by one and loses three digits.
    token_losses = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), batch.targets.reshape(-1), ignore_index=IGNORED, reduction="none"
    ).view_as(batch.targets)
    tokens = (batch.targets != IGNORED).sum(dim=1).clamp(min=1)
    return token_losses.sum(dim=1) / tokens


@cache
def fast_bfloat16(device: str = "cpu") -> bool:
    """Whether a device multiplies matrices faster in bfloat16 than in float32; measured, once per process.

    Some CPUs have bfloat16 units and no fast way to them, some have neither and are many times slower.
    """
    if device == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # The shapes of a small model's layer and of a short document: some milliseconds.
    tokens, weights = torch.ones(128, 576), torch.ones(576, 1536)
    formats = (torch.float32, torch.bfloat16)
    factors = {dtype: (tokens.to(dtype), weights.to(dtype)) for dtype in formats}
    best = dict.fromkeys(formats, float("inf"))
    for _ in range(4):
        for dtype, (left, right) in factors.items():
            start = time.perf_counter()
            torch.mm(left, right)
            best[dtype] = min(best[dtype], time.perf_counter() - start)
    return _GAIN * best[torch.bfloat16] < best[torch.float32]


def load_saved(base: str, adapter: Path, dtype: str = "float32") -> Any:
    """The base model with an adapter that `Generator.save_adapter` wrote, for use elsewhere.

    Raises
    ------
    ModelError
        If the model can't be loaded.
    """
    options = studies.Generator(base=base, dtype="bfloat16" if dtype == "bfloat16" else "float32")
    folder = _verified(options, {})
    config = _load_config(folder, options)
    architecture = architecture_of(config)(config, _load_tokenizer(folder))
    model = _load_base(architecture, folder, options, _dtype(options, torch.device("cpu")))
    return PeftModel.from_pretrained(model, str(adapter))


# Where the model is and what it computes in


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _dtype(options: studies.Generator, device: torch.device) -> torch.dtype:
    fast = options.dtype == "bfloat16" or (options.dtype == "auto" and fast_bfloat16(device.type))
    return torch.bfloat16 if fast else torch.float32


# Loading


def _verified(options: studies.Generator, local: Mapping[str, Path]) -> Path:
    """Folder of the model, whose files are those that the study pins, if it pins any."""
    source = location.source_of(options.base, local)
    gguf = location.gguf_of(source)
    if gguf is None and options.sha256 is None:
        return source
    # A file is read once, for both the pin and the cache.
    found = Manifest.of(source)
    check_pinned("generator.base", options.base, source, found, options.sha256)
    return source if gguf is None else converted(gguf, found.files[gguf.name], _convert)


def _load_config(folder: Path, options: studies.Generator) -> Any:
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except _UNREADABLE as cause:
        raise ModelError(
            f"generator.base is {options.base!r}: its config.json is none of a model that transformers "
            f"{transformers.__version__} knows; code that comes with a model is never run"
        ) from cause
    _drop_nothing(config)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"generator.base is {options.base!r}: its weights are quantised (quantization_config in config.json); "
            "gradients through them can't be checked; take the model's plain weights or a GGUF file"
        )
    return config


def _drop_nothing(config: Any) -> None:
    """No dropout, of modules, functions or layers: it would draw from a seeded generator and make gradients random."""
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, value in part.to_dict().items():
            if "drop" in name and isinstance(value, (int, float)) and not isinstance(value, bool):
                setattr(part, name, 0.0)


def _load_base(architecture: Architecture, folder: Path, options: studies.Generator, dtype: torch.dtype) -> Any:
    try:
        model, found = architecture.load(folder, config=architecture.config, dtype=dtype, output_loading_info=True)
    except (*_UNREADABLE, RuntimeError, SafetensorError) as cause:
        raise ModelError(
            f"generator.base is {options.base!r}: no language model can be loaded from it; a folder in Hugging Face "
            "format, a hub id or 'package:NAME' is accepted"
        ) from cause
    if missing := sorted(found["missing_keys"]):
        # They would be drawn at random, at every machine others.
        raise ModelError(
            f"generator.base is {options.base!r}: its files lack {len(missing)} of the model's weights, such as "
            f"{missing[0]!r}"
        )
    model.config.use_cache = True
    model.requires_grad_(False)
    return model


def _load_tokenizer(folder: Path) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except _UNREADABLE as cause:
        raise ModelError(f"generator.base: no tokenizer can be loaded from {str(folder)!r}") from cause
    if tokenizer.eos_token_id is None:
        raise ModelError(f"generator.base: the tokenizer of {str(folder)!r} has no end-of-text token; one is needed")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = tokenizer.eos_token_id
    return tokenizer


def _check_context(architecture: Architecture, options: studies.Generator) -> None:
    if architecture.context is not None and options.max_tokens > architecture.context:
        raise ModelError(
            f"generator.max_tokens is {options.max_tokens}, but the context of {options.base!r} is "
            f"{architecture.context} tokens; at most that many are accepted"
        )


def _convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF model, which is dequantised as it is loaded, as a plain one."""
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(**source)
        loaded = architecture_of(config).loader.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except (*_UNREADABLE, ImportError) as cause:
        raise ModelError(f"generator.base: {str(gguf)!r} can't be read as a GGUF model of a known family") from cause
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # The loaded model is marked as quantised, which peft and saving trip over: copy its weights into a plain one.
    plain = type(loaded)._from_config(config, dtype=torch.float32)
    plain.load_state_dict(loaded.state_dict(), strict=True)
    plain.tie_weights()
    plain.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    (folder / "origin.json").write_text(json.dumps({"file": gguf.name}), encoding="utf-8")


# The adapter


def _attach(base: Any, options: studies.Generator, task_type: str) -> Any:
    targets = _targets(base, options)
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=0.0,
        target_modules=targets,
        task_type=task_type,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in base.modules()),
    )
    try:
        with warnings.catch_warnings():
            # peft asks transformers about a property under its old name.
            warnings.simplefilter("ignore", FutureWarning)
            # It says so of tied weights; so do we, below, and refuse.
            warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
            model = get_peft_model(base, config)
    except ValueError as cause:
        raise ModelError(
            f"generator.target_modules is {targets!r}: no layer of {options.base!r} matches; name its linear layers"
        ) from cause
    _check_targets(model)
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.data.copy_(_initial_a(options.init_seed, name, parameter))
    return model


def _targets(base: Any, options: studies.Generator) -> str | list[str]:
    """As peft takes them: a list of names' ends, or a pattern."""
    if options.target_modules == "all-linear":
        return "all-linear"
    if options.target_modules != "attention":
        return list(options.target_modules)
    family = base.config.model_type
    if family not in USUAL_TARGETS:
        raise ModelError(
            f"generator.target_modules is 'attention', but which layers that are in a {family!r} model isn't known; "
            "name them, as in ['q_proj', 'v_proj']"
        )
    usual = USUAL_TARGETS[family]
    return usual if isinstance(usual, str) else list(usual)


def _check_targets(model: Any) -> None:
    """An adapter is merged into the weight below it: that has to be a matrix, and that layer's alone."""
    owners = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners[id(parameter)].append(name)
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        plain = name.removeprefix("base_model.model.")
        if not isinstance(layer.base_layer, (torch.nn.Linear, Conv1D)):
            raise ModelError(
                f"generator.target_modules: {plain!r} is a {type(layer.base_layer).__name__}; linear layers are "
                "accepted"
            )
        shared = [other for other in owners[id(layer.base_layer.weight)] if not other.startswith(f"{name}.")]
        if shared:
            raise ModelError(
                f"generator.target_modules: the weight of {plain!r} is tied to "
                f"{shared[0].removeprefix('base_model.model.')!r}, which merging the adapter would change too; name "
                "other layers"
            )


def _initial_a(seed: int, name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    """Public A, uniform as in LoRA, from the study's seed and the parameter's name: equal on every machine."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "big")
    words = np.random.Philox(key=key).random_raw(parameter.numel())
    uniform = (words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    bound = 1.0 / np.sqrt(parameter.shape[1])
    return torch.from_numpy(((2 * uniform - 1) * np.float32(bound)).reshape(tuple(parameter.shape)))
