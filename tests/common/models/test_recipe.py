"""What a sentence-transformers folder says and isn't supported is refused: it would give other vectors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from common.errors import ModelError
from common.models.embedder import load_embedder
from common.models.recipe import Recipe
from common.study import Voting
from tests.tiny_embedder import modules, pooling, write_json


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("1_Pooling/config.json", pooling("max_tokens"), "its pooling is ['max']; 'mean' or 'cls' alone is supported"),
        ("1_Pooling/config.json", pooling("mean_tokens", "cls_token"), "its pooling is ['mean', 'cls']"),
        ("1_Pooling/config.json", {"pooling_mode": "lasttoken"}, "its pooling is 'lasttoken'"),
        ("1_Pooling/config.json", None, "no 1_Pooling/config.json there"),
        ("modules.json", modules("Transformer", "Pooling", "Dense"), "lists Transformer, Pooling, Dense"),
        ("modules.json", [{"idx": 0}], "an entry without type and path"),
        ("modules.json", {}, "holds no JSON list"),
        ("modules.json", [{"type": "a.Transformer", "path": "0_T"}, {"type": "a.Pooling", "path": "1"}], "'0_T'"),
        ("modules.json", [{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "../1"}], "'../1'"),
        ("sentence_bert_config.json", [], "holds no JSON object"),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "the prompt 'query'"),
        ("tokenizer.json", {}, "can't be read as a tokenizer"),
        ("tokenizer.json", None, "no tokenizer.json there"),
    ],
)
def test_what_would_give_other_vectors_is_refused(folder: Path, name: str, content: Any, said: str) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        write_json(folder, name, content)
    with pytest.raises(ModelError, match=re.escape(said)):
        load_embedder(Voting(embedder=f"onnx:{folder}"))


def test_a_prompt_that_pooling_leaves_out_is_refused(folder: Path) -> None:
    prompt = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    write_json(folder, "config_sentence_transformers.json", prompt)
    Recipe.of(folder)
    write_json(folder, "1_Pooling/config.json", pooling("mean_tokens", include_prompt=False))
    with pytest.raises(ModelError, match="leaves out the prompt"):
        Recipe.of(folder)


def test_a_limit_that_is_nowhere_or_none_is_refused(folder: Path) -> None:
    write_json(folder, "sentence_bert_config.json", {})
    write_json(folder, "tokenizer_config.json", {"model_max_length": 10**30})
    write_json(folder, "config.json", {})
    with pytest.raises(ModelError, match="no file says how many tokens"):
        Recipe.of(folder)


def test_a_file_that_is_no_json_is_named(folder: Path) -> None:
    (folder / "modules.json").write_text("[")
    with pytest.raises(ModelError, match=r"modules\.json can't be read as JSON"):
        Recipe.of(folder)
