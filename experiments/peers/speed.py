"""What the speed scripts share: the model's shape, sizes, and one JSON line a measurement."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

# `gapscope model init jamba-3b-shape DIR` writes the same into DIR/config.json.
JAMBA_3B: dict[str, Any] = {
    "architectures": ["JambaForCausalLM"],
    "model_type": "jamba",
    "vocab_size": 65536,
    "hidden_size": 2560,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 1,
    "attn_layer_period": 14,
    "attn_layer_offset": 7,
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": 160,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "max_position_embeddings": 262144,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}


def decode_size(requests: int) -> str:
    """Requests that decode together."""
    return f"{requests}"


def prefill_size(requests: int, prompt: int) -> str:
    return f"{requests} x {prompt}"


def whole_size(requests: int, prompt: int, new: int) -> str:
    """Requests of `prompt` tokens with `new` more each, from the prompt to the last token."""
    return f"{requests} x ({prompt} + {new})"


def product_size(rows: int, outputs: int, inner: int) -> str:
    return f"{rows} x {outputs} x {inner}"


def emit(peer: str, work: str, size: str, how: str, **measured: Any) -> None:
    """One row. `work`, `size` and `how` say what was measured, the rest what was found."""
    print(json.dumps({"peer": peer, "work": work, "size": size, "how": how, **measured}),
          flush=True)


def attempt(peer: str, work: str, size: str, how: str, body: Callable[[], float]) -> None:
    """Emits the tokens a second that `body` returns, or why there are none: a size that does not
    fit must not cost the others."""
    try:
        emit(peer, work, size, how, tokens_per_s=round(body(), 1))
    except Exception as error:  # Out of memory has many types.
        emit(peer, work, size, how, error=f"{type(error).__name__}: {error}"[:300])


def median_s(body: Callable[[], Any], repeats: int) -> float:
    """Wall clock of one call."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        body()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
