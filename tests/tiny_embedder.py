"""A tiny sentence-transformers model with random weights, made here in a second; and changes to its JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from tests.tiny_model import SENTENCES

DIMENSION = 32
MOST_TOKENS = 24
_POSITIONS = 64
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def make_tiny_embedder(folder: Path) -> Path:
    """Save a random two-layer BERT whose tokens' vectors are averaged, with its tokenizer; return the folder."""
    tokenizer = _tokenizer()
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=DIMENSION, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=_POSITIONS, initializer_range=0.3,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_json(folder, "modules.json", modules("Transformer", "Pooling"))
    write_json(folder, "sentence_bert_config.json", {"max_seq_length": MOST_TOKENS, "do_lower_case": False})
    write_json(folder, "1_Pooling/config.json", pooling("mean_tokens"))
    return folder


def modules(*kinds: str) -> list[dict[str, Any]]:
    """The content of modules.json."""
    paths = {kind: f"{index}_{kind}" if index else "" for index, kind in enumerate(kinds)}
    return [
        {"idx": index, "name": str(index), "path": paths[kind], "type": f"sentence_transformers.models.{kind}"}
        for index, kind in enumerate(kinds)
    ]


def pooling(*modes: str, **others: Any) -> dict[str, Any]:
    """The content of 1_Pooling/config.json."""
    return {"word_embedding_dimension": DIMENSION, **{f"pooling_mode_{mode}": True for mode in modes}, **others}


def write_json(folder: Path, name: str, content: Any) -> None:
    """Write one of the folder's files."""
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content))


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    alphabet = [chr(code) for code in range(33, 127)]
    tokenizer.train_from_iterator(
        SENTENCES, trainers.WordPieceTrainer(vocab_size=400, special_tokens=_SPECIAL, initial_alphabet=alphabet)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(token, tokenizer.token_to_id(token)) for token in _SPECIAL[2:]]
    )
    # As published ones do, it says how it was trained, which isn't how it is used.
    tokenizer.enable_padding(length=MOST_TOKENS)
    tokenizer.enable_truncation(8)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_max_length=_POSITIONS,
    )  # fmt: skip
