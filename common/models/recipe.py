"""How a sentence-transformers model makes a vector of a text: what the JSON files in its folder say.

Read here without that library, which needs torch. What a folder may say and isn't known here is refused, as it would
give other vectors than the model's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from common.errors import ModelError

TOKENIZER = "tokenizer.json"
_MODULES, _TRANSFORMER, _PROMPTS = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
_TOKENIZER_CONFIG, _CONFIG = "tokenizer_config.json", "config.json"

Pooling = Literal["mean", "cls"]

_BY_FLAG: Mapping[str, str] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Older folders have one flag for each way of pooling."""

_UNLIMITED = 1 << 20
"""Tokens; transformers writes huge numbers for a tokenizer without a limit."""


@dataclass(frozen=True)
class Recipe:
    """From text to vector.

    Attributes
    ----------
    files
        Names, inside the folder, of the files that say so and of the tokenizer.
    most_tokens
        Of a text that are read, those that mark its ends included.
    pooling
        The vector is the mean of the tokens' vectors, or the first token's.
    unit_length
        Whether it is then made to have length 1.
    prompt
        What is put before every text.
    lower_case
        Whether letters are made small first.
    """

    files: tuple[str, ...]
    most_tokens: int
    pooling: Pooling
    unit_length: bool
    prompt: str
    lower_case: bool

    @classmethod
    def of(cls, folder: Path) -> Recipe:
        """Read it from a model's folder.

        Raises
        ------
        ModelError
            If a file can't be read, or says what isn't supported.
        """
        read = _Folder(folder)
        if not (folder / TOKENIZER).is_file():
            raise ModelError(
                f"model {str(folder)!r}: no {TOKENIZER} there; a folder of sentence-transformers is needed"
            )
        modules = _modules(read)
        pooling, include_prompt = _pooling(read, modules.get("Pooling"))
        prompt = _prompt(read)
        if prompt and not include_prompt:
            raise read.refusal("its pooling leaves out the prompt, which isn't supported")
        transformer = read.json(_TRANSFORMER)
        return cls(
            most_tokens=_most_tokens(read, transformer),
            pooling=pooling,
            unit_length="Normalize" in modules,
            prompt=prompt,
            lower_case=bool(transformer.get("do_lower_case", False)),
            files=(TOKENIZER, *read.found),
        )

    def pool(self, tokens: NDArray[Any]) -> NDArray[np.float32]:
        """A text's vector, float32 ``(dimension,)``, from its tokens' vectors ``(tokens, dimension)``, at least one."""
        # In float64, so that a mean of many rows loses nothing.
        rows = tokens.astype(np.float64)
        pooled = rows[0] if self.pooling == "cls" else rows.mean(axis=0)
        if self.unit_length:
            pooled = pooled / max(float(np.linalg.norm(pooled)), 1e-12)
        return np.asarray(pooled, dtype=np.float32)


class _Folder:
    """A folder's JSON files, and which of them are there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.found: list[str] = []

    def json(self, name: str, kind: type = dict) -> Any:
        """Content of a file; empty if there is none."""
        file = self._folder / name
        if not file.is_file():
            return kind()
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as cause:
            raise self.refusal(f"{name} can't be read as JSON") from cause
        if not isinstance(content, kind):
            raise self.refusal(f"{name} holds no JSON {'list' if kind is list else 'object'}")
        self.found.append(name)
        return content

    def refusal(self, problem: str) -> ModelError:
        return ModelError(f"model {str(self._folder)!r}: {problem}")


def _modules(read: _Folder) -> Mapping[str, str]:
    """Kind of module -> its folder. Without a list, a transformer whose vectors are pooled."""
    listed = read.json(_MODULES, list)
    if not listed:
        return {"Transformer": "", "Pooling": "1_Pooling"}
    try:
        modules = {str(entry["type"]).rpartition(".")[2]: str(entry["path"]) for entry in listed}
    except (TypeError, KeyError) as cause:
        raise read.refusal(f"{_MODULES} holds an entry without type and path") from cause
    if list(modules) not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise read.refusal(
            f"{_MODULES} lists {', '.join(modules)}; Transformer, Pooling and, if wanted, Normalize are supported"
        )
    if modules["Transformer"]:
        raise read.refusal(f"its transformer lies in {modules['Transformer']!r}; the model's own folder is supported")
    if Path(modules["Pooling"]).name != modules["Pooling"]:
        raise read.refusal(f"its pooling lies in {modules['Pooling']!r}; a folder of the model's is supported")
    return modules


def _pooling(read: _Folder, folder: str | None) -> tuple[Pooling, bool]:
    """How token vectors are pooled, and whether the prompt's are among them."""
    config = read.json(f"{folder}/{_CONFIG}")
    if not config and _MODULES in read.found:
        raise read.refusal(f"no {folder}/{_CONFIG} there, which {_MODULES} asks for")
    flags = [mode for flag, mode in _BY_FLAG.items() if config.get(flag)]
    modes = config.get("pooling_mode", flags or ["mean"])
    match [modes] if isinstance(modes, str) else modes:
        case ["mean" | "cls" as mode]:
            return mode, bool(config.get("include_prompt", True))
    raise read.refusal(f"its pooling is {modes!r}; 'mean' or 'cls' alone is supported")


def _prompt(read: _Folder) -> str:
    config = read.json(_PROMPTS)
    name = config.get("default_prompt_name")
    prompts = config.get("prompts") or {}
    if name is None:
        return ""
    if not isinstance(prompts, dict) or not isinstance(prompts.get(name), str):
        raise read.refusal(f"{_PROMPTS} names the prompt {name!r}, which it doesn't hold")
    return str(prompts[name])


def _most_tokens(read: _Folder, transformer: Mapping[str, Any]) -> int:
    # All are read, whether or not they decide: the graph was made from them, and a change is to be noticed.
    tokenizer, config = read.json(_TOKENIZER_CONFIG), read.json(_CONFIG)
    own = transformer.get("max_seq_length")
    limits = [own] if own else [tokenizer.get("model_max_length"), config.get("max_position_embeddings")]
    known = [limit for limit in limits if isinstance(limit, int) and 0 < limit < _UNLIMITED]
    if not known:
        raise read.refusal(f"no file says how many tokens it reads; {_TRANSFORMER} with max_seq_length is needed")
    return min(known)
