"""Tiny language models of many families with a tokenizer, made here in a second: real code paths, no download.

2 layers each (of an encoder-decoder, 2 and 2), byte-level BPE trained on a few sentences.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

SENTENCES = [
    "The staff were kind and explained everything clearly.",
    "I waited three hours and nobody told me why.",
    "Parking is difficult and the ward was too warm.",
    "Nothing could be improved, thank you to all the nurses.",
    "The doctor listened to me and the treatment helped.",
    "My appointment was cancelled twice without a reason.",
]

CONTEXT = 256
"""Of all kinds that have a limit."""

_LLAMA = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
}  # fmt: skip
_GEMMA = {**_LLAMA, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}


def _gpt2(**ids: int) -> Any:
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT, **ids))


def _opt(**ids: int) -> Any:
    config = OPTConfig(
        hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32,
        max_position_embeddings=CONTEXT, **ids,
    )  # fmt: skip
    return OPTForCausalLM(config)


def _bart(**ids: int) -> Any:
    config = BartConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=CONTEXT,
        # As the published ones: it starts with the end of a text, and its first words are the beginning of one.
        decoder_start_token_id=ids["eos_token_id"], forced_eos_token_id=None, init_std=0.2, **ids,
    )  # fmt: skip
    return BartForConditionalGeneration(config)


def _t5(**options: Any) -> Any:
    config = T5Config(**{**_T5, **options, "decoder_start_token_id": options["pad_token_id"]})
    return T5ForConditionalGeneration(config)


CAUSAL: Mapping[str, Callable[..., Any]] = {
    "llama": lambda **ids: LlamaForCausalLM(LlamaConfig(**_LLAMA, **ids)),
    "gpt2": _gpt2,
    "gemma3": lambda **ids: Gemma3ForCausalLM(Gemma3TextConfig(**_GEMMA, **ids)),
    # Its logits are capped.
    "gemma2": lambda **ids: Gemma2ForCausalLM(Gemma2Config(**_GEMMA, **ids)),
    "qwen2": lambda **ids: Qwen2ForCausalLM(Qwen2Config(**_LLAMA, **ids)),
    "opt": _opt,
}
ENCODER_DECODER: Mapping[str, Callable[..., Any]] = {
    "bart": _bart,
    "t5": _t5,
    "t5-v1.1": lambda **ids: _t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False, **ids),
}
FAMILIES = (*CAUSAL, *ENCODER_DECODER)

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.layers": "blk", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def make_tiny_model(folder: Path, kind: str = "llama") -> Path:
    """Save a random tiny model of one of `FAMILIES` with its tokenizer and return the folder."""
    tokenizer = _tokenizer(kind)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    torch.manual_seed(0)
    model = {**CAUSAL, **ENCODER_DECODER}[kind](vocab_size=len(tokenizer), **ids)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tiny_gguf(file: Path) -> Path:
    """Write the tiny Qwen2 of `make_tiny_model` as a GGUF file, unquantised: its weights need no reordering there."""
    folder = make_tiny_model(file.parent / f".{file.stem}", "qwen2")
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())["model"]
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_vocab_size(model.config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(tokenizer["vocab"], key=tokenizer["vocab"].get))
    writer.add_token_types([3] + [1] * (model.config.vocab_size - 1))
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["merges"]])
    for name in ("bos", "eos", "pad"):
        getattr(writer, f"add_{name}_token_id")(model.config.eos_token_id)
    for name, parameter in model.named_parameters():
        renamed = reduce(lambda known, names: known.replace(*names), _GGUF_NAMES.items(), name)
        writer.add_tensor(renamed, parameter.detach().numpy())
    for finish in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, finish)()
    return file


def _tokenizer(kind: str) -> PreTrainedTokenizerFast:
    special = ["<s>", "<pad>", "</s>"] if kind in ENCODER_DECODER else ["<|end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    if kind in ENCODER_DECODER:
        template = "<s> $A </s>" if kind == "bart" else "$A </s>"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
        )
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|end|>", eos_token="<|end|>", pad_token="<|end|>"
    )
