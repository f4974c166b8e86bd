#!/usr/bin/env python3
"""Writes a small random Llama with a tokenizer of single bytes, as vLLM and gapscope both read it.

usage: tiny_llama.py DIR [SEED]. Heads of 32 dimensions, the fewest that vLLM's CPU attention takes. Needs
torch, transformers and tokenizers, which every vLLM environment has."""

from __future__ import annotations

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = {"pad": 256, "bos": 257, "eos": 258}


def main(folder: str, seed: str = "20261130") -> None:
    torch.manual_seed(int(seed))
    shape = LlamaConfig(
        vocab_size=272, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
        rms_norm_eps=1e-5, rope_theta=10_000.0, tie_word_embeddings=False,
        # Large enough that a temperature shows: logits have a standard deviation of about 1.
        initializer_range=0.08,
        **{f"{name}_token_id": token for name, token in SPECIAL.items()})
    LlamaForCausalLM(shape).float().save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    text = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[]))
    text.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    text.decoder = decoders.ByteLevel()
    text.add_special_tokens([f"<{name}>" for name in SPECIAL])
    tokens = {f"{name}_token": f"<{name}>" for name in SPECIAL}
    PreTrainedTokenizerFast(tokenizer_object=text, **tokens).save_pretrained(folder)


main(*sys.argv[1:])
