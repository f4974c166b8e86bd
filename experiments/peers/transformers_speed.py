#!/usr/bin/env python3
"""Times transformers' own JambaForCausalLM, one JSON line a measurement.

    python3 experiments/peers/transformers_speed.py > transformers.jsonl

The shape of Jamba-3B in bf16; without --model its weights are transformers' random ones. Its eager
Mamba (no mamba-ssm), attention by sdpa. "generate" samples at temperature 1 and counts new tokens a
second, prompts included in the time; "score" is one forward over prompts and completions with the
log-softmax of every completion token, 32 sequences at a time, and counts all tokens.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import speed

GENERATES = ((128, 128, 32), (64, 128, 128), (256, 128, 128))
SCORES = ((32, 128, 32), (256, 128, 128))
SEQUENCES_PER_FORWARD = 32


def main() -> int:
    args = arguments()
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(7)
    peer = f"transformers {transformers.__version__}"
    model = load(args.model, args.device)
    generate(model, 2, 8, 2)
    for what in args.generate or GENERATES:
        speed.attempt(peer, "generate", speed.whole_size(*what), "wall",
                      lambda w=what: w[0] * w[2] / clock(args, lambda: generate(model, *w)))
    for what in args.score or SCORES:
        requests, prompt, new = what
        tokens = requests * (prompt + new)
        speed.attempt(peer, "score", speed.whole_size(*what), "wall",
                      lambda w=what, t=tokens: t / clock(args, lambda: score(model, *w)))
    return 0


def arguments() -> argparse.Namespace:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--model", type=Path, help="a folder that `gapscope model init` wrote "
                        "[default: the shape of Jamba-3B with random weights]")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=1, help="of each, the median [%(default)s]")
    for work in ("generate", "score"):
        parser.add_argument(f"--{work}", type=sizes, metavar="N,P,T;...",
                            help="requests, prompt and new tokens, instead of the table's")
    return parser.parse_args()


def sizes(text: str) -> list[tuple[int, int, int]]:
    found = []
    for one in text.split(";"):
        requests, prompt, new = map(int, one.split(","))
        found.append((requests, prompt, new))
    return found


def load(folder: Path | None, device: str) -> Any:
    import torch
    import transformers

    how = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
    if folder:
        loaded: Any = transformers.JambaForCausalLM.from_pretrained(
            folder, local_files_only=True, use_mamba_kernels=False, **how)
        return loaded.to(device).eval()
    config = transformers.JambaConfig(**speed.JAMBA_3B, use_mamba_kernels=False)
    with torch.device(device):
        return transformers.JambaForCausalLM._from_config(config, **how).eval()


def clock(args: argparse.Namespace, body: Any) -> float:
    """Seconds, everything on the device included."""
    import torch

    def whole() -> None:
        body()
        if args.device == "cuda":
            torch.cuda.synchronize()

    return speed.median_s(whole, args.repeats)


def tokens(model: Any, requests: int, length: int) -> Any:
    import torch

    return torch.randint(3, model.config.vocab_size, (requests, length), device=model.device)


def generate(model: Any, requests: int, prompt: int, new: int) -> None:
    import torch

    ids = tokens(model, requests, prompt)
    with torch.inference_mode():
        done = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0,
                              temperature=1.0, max_new_tokens=new, min_new_tokens=new,
                              pad_token_id=0)
    assert done.shape == (requests, prompt + new), "a completion was cut"


def score(model: Any, requests: int, prompt: int, new: int) -> None:
    import torch

    ids = tokens(model, requests, prompt + new)
    with torch.inference_mode():
        for rows in ids.split(SEQUENCES_PER_FORWARD):
            logits = model(input_ids=rows, use_cache=False, logits_to_keep=new + 1).logits
            logps = logits[:, :-1].float().log_softmax(-1)
            logps.gather(2, rows[:, prompt:, None]).cpu()


if __name__ == "__main__":
    sys.exit(main())
