"""The generator: a public causal language model with a LoRA adapter. The only module of `common` that knows torch.

Strong sites train the adapter, the coordinator averages adapters and samples from the model. With FFA-LoRA
every side derives the same A from the study's public seed, and only B travels.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import study as studies
from common.codes import ControlCodes
from common.errors import AdapterMismatchError, ModelError
from common.models import location
from common.protocol import Adapter, adapter_bytes

_IGNORED_LABEL = -100

# Bars that are redrawn in place are noise in a log file.
transformers.logging.disable_progress_bar()


class Generator:
    """A base model with its tokenizer and the study's adapter attached.

    Attributes
    ----------
    model
        The peft model; its trained parameters are float32.
    tokenizer
        The base model's tokenizer.
    """

    def __init__(self, options: studies.Generator, local: Mapping[str, Path] | None = None) -> None:
        folder = _resolve(options.base, local or {})
        self.options = options
        self.tokenizer = _load_tokenizer(folder)
        self.model = _attach(_load_base(folder, options), options)

    @property
    def trained(self) -> dict[str, torch.nn.Parameter]:
        """The adapter's trained parameters by name, in a fixed order."""
        return {name: p for name, p in sorted(self.model.named_parameters()) if p.requires_grad}

    def adapter(self) -> dict[str, NDArray[np.float32]]:
        """The adapter as it travels: trained parameters only."""
        return {name: p.detach().float().cpu().numpy().copy() for name, p in self.trained.items()}

    def frozen_sha256(self) -> str:
        """Digest of the adapter's frozen part, in hexadecimal."""
        frozen = {
            name: p.detach().float().cpu().numpy()
            for name, p in self.model.named_parameters()
            if "lora_" in name and not p.requires_grad
        }
        return hashlib.sha256(adapter_bytes(frozen)).hexdigest()

    def load_adapter(self, adapter: Adapter) -> None:
        """Put travelled weights into the model.

        Raises
        ------
        AdapterMismatchError
            If names or shapes differ, or a weight isn't finite.
        """
        trained = self.trained
        check_adapter(adapter, {name: tuple(p.shape) for name, p in trained.items()})
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(torch.from_numpy(np.array(adapter[name], dtype=np.float32)))

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter in peft's layout."""
        self.model.save_pretrained(str(folder))

    def start_round(self, server_round: int) -> None:
        """Train the factors that this round trains."""

    def room(self, prompt: Sequence[int]) -> int:
        """Tokens that a text may have after ``prompt``."""
        return self.options.max_tokens - len(prompt)

    def batch(self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> Batch:
        """Prompts and texts as the model reads them."""
        return Batch(prompts, texts)

    def prompts(self, codes: ControlCodes) -> list[list[int]]:
        """Token ids of every code's prompt."""
        return [self.tokenizer(codes.prompt(index))["input_ids"] for index in range(len(codes))]

    def encode(self, texts: Sequence[str], room: Sequence[int]) -> list[list[int]]:
        """Token ids of each text with the end-of-text token, cut to ``room[i]`` tokens. A cut text has no end token."""
        encoded = self.tokenizer([f" {text}" for text in texts], add_special_tokens=False)["input_ids"]
        end = [self.tokenizer.eos_token_id]
        return [(ids + end)[: max(space, 0)] for ids, space in zip(encoded, room, strict=True)]


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
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits[:, :-1].float()
    targets = batch.labels[:, 1:]
    # One row a token: along a strided vocabulary, torch adds up 50,000 terms one by one and loses three digits.
    token_losses = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=_IGNORED_LABEL, reduction="none"
    ).view_as(targets)
    tokens = (targets != _IGNORED_LABEL).sum(dim=1).clamp(min=1)
    return token_losses.sum(dim=1) / tokens


class Batch:
    """Prompts and texts, right-padded; labels cover the text only.

    Attributes
    ----------
    input_ids, attention_mask, labels
        int64 of shape ``(documents, tokens)``. Padding is masked by the attention mask, never by the padding id, which
        many tokenizers share with the end-of-text token.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> None:
        rows = [list(prompt) + list(text) for prompt, text in zip(prompts, texts, strict=True)]
        width = max(len(row) for row in rows)
        self.input_ids = torch.zeros(len(rows), width, dtype=torch.long)
        self.attention_mask = torch.zeros_like(self.input_ids)
        self.labels = torch.full_like(self.input_ids, _IGNORED_LABEL)
        for index, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
            self.input_ids[index, : len(row)] = torch.tensor(row)
            self.attention_mask[index, : len(row)] = 1
            self.labels[index, len(prompt) : len(row)] = torch.tensor(row[len(prompt) :])


def fast_bfloat16() -> bool:
    """Whether this machine multiplies bfloat16 matrices in hardware; elsewhere float32 is faster."""
    return torch.cuda.is_available() or bool(torch.cpu._is_avx512_bf16_supported())


def load_saved(base: str, adapter: Path, dtype: str = "float32") -> Any:
    """The base model with an adapter that `Generator.save_adapter` wrote, for use elsewhere."""
    options = studies.Generator(base=base, dtype="bfloat16" if dtype == "bfloat16" else "float32")
    return PeftModel.from_pretrained(_load_base(_resolve(base, {}), options), str(adapter))


def _attach(base: Any, options: studies.Generator) -> Any:
    targets = options.target_modules
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=0.0,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
        fan_in_fan_out=base.config.model_type == "gpt2",
    )
    try:
        with warnings.catch_warnings():
            # peft asks transformers about a property under its old name.
            warnings.simplefilter("ignore", FutureWarning)
            model = get_peft_model(base, config)
    except ValueError as cause:
        raise ModelError(
            f"generator.target_modules is {targets!r}: no layer of {options.base!r} matches; name its linear layers"
        ) from cause
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.data.copy_(_initial_a(options.init_seed, name, parameter))
            parameter.requires_grad_(options.lora != "ffa")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            # Dropout would draw from a seeded generator and make a document's gradient random.
            module.p = 0.0
    return model


def _initial_a(seed: int, name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    """Public A, uniform as in LoRA, from the study's seed and the parameter's name: equal on every machine."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "big")
    words = np.random.Philox(key=key).random_raw(parameter.numel())
    uniform = (words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    bound = 1.0 / np.sqrt(parameter.shape[1])
    return torch.from_numpy(((2 * uniform - 1) * np.float32(bound)).reshape(tuple(parameter.shape)))


def _load_base(folder: str, options: studies.Generator) -> Any:
    dtype = torch.bfloat16 if options.dtype == "bfloat16" else torch.float32
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as cause:
        raise ModelError(
            f"generator.base is {options.base!r}: no causal language model can be loaded from it; a folder in Hugging "
            "Face format, a hub id or 'package:NAME' is accepted"
        ) from cause
    model.config.use_cache = True
    model.requires_grad_(False)
    return model


def _load_tokenizer(folder: str) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as cause:
        raise ModelError(f"generator.base: no tokenizer can be loaded from {folder!r}") from cause
    if tokenizer.eos_token_id is None:
        raise ModelError(f"generator.base: the tokenizer of {folder!r} has no end-of-text token; one is needed")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = tokenizer.eos_token_id
    return tokenizer


def _resolve(base: str, local: Mapping[str, Path]) -> str:
    """Folder or hub id of the base model on this machine."""
    base = location.check_base(base, local)
    package = location.package_of(base)
    return base if package is None else str(packaged_model(package))


def packaged_model(package: str) -> Path:
    """Folder of a model that came as a Python package with a GGUF file; converted once, then cached.

    Raises
    ------
    ModelError
        If the package isn't installed or holds no GGUF file.
    """
    gguf = location.packaged_gguf(package)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedcorpus" / "models"
    target = cache / f"{package}-{importlib.metadata.version(package)}"
    if (target / "config.json").is_file():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{package}-", dir=cache))
    try:
        _convert_gguf(gguf, building)
        try:
            building.rename(target)
        except OSError:
            # Another process finished first; its folder holds the same model.
            shutil.rmtree(building)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return target


def _convert_gguf(gguf: Path, folder: Path) -> None:
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # The loaded model is marked as quantised, which peft and saving trip over: copy its weights into a plain one.
    plain = type(loaded)._from_config(config, dtype=torch.float32)
    plain.load_state_dict(loaded.state_dict(), strict=True)
    plain.tie_weights()
    plain.save_pretrained(str(folder))
    AutoTokenizer.from_pretrained(**source).save_pretrained(str(folder))
    (folder / "origin.json").write_text(json.dumps({"file": gguf.name}), encoding="utf-8")
