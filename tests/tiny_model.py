"""A tiny causal language model and tokenizer, made here in a second: real code paths, no download.

Llama architecture (as the demo's generator), 2 layers, byte-level BPE trained on a few sentences.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SENTENCES = [
    "The staff were kind and explained everything clearly.",
    "I waited three hours and nobody told me why.",
    "Parking is difficult and the ward was too warm.",
    "Nothing could be improved, thank you to all the nurses.",
    "The doctor listened to me and the treatment helped.",
    "My appointment was cancelled twice without a reason.",
]


def make_tiny_model(folder: Path, kind: str = "llama") -> Path:
    """Save a random tiny model of ``kind`` ('llama' or 'gpt2') with its tokenizer and return the folder."""
    tokenizer = _tokenizer()
    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=4, n_positions=256,
            bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        model = GPT2LMHeadModel(config)
    else:
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
                bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id,
            )
        )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
