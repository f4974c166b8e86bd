#!/usr/bin/env python3
"""Times vLLM at the sizes of experiments/h200/bench.toml, one JSON line a measurement.

    python3 experiments/peers/vllm_speed.py > vllm.jsonl

The model has the shape of Jamba-3B in bf16 with an f32 state; without --model its weights are
vLLM's own dummies, which cost the same. CUDA graphs and torch.compile are on, as vLLM has them.
The logprob of every sampled token is asked for, as gapscope records it, but where "no logprobs" is
said.

Two clocks: "wall" is what a caller of `LLM.generate` waits for. "GPU-only" is the sum of all
kernels' device times from torch's profiler, so that vLLM's scheduling costs it nothing: the
difference of 33 and 1 new tokens is 32 decode steps of a full batch and no prefill.

Needs vLLM (0.20 to 0.25 for a machine with torch 2.11) and a GPU with 80 GB or more.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import speed

# A machine without a network is told not to look for one.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
DECODES = (64, 256, 1024)
PREFILLS = ((128, 128), (256, 1024))
PROFILED_STEPS = 32


class Peer:
    def __init__(self, folder: Path, dummy: bool, repeats: int) -> None:
        import vllm

        self.name = f"vLLM {vllm.__version__}"
        self.sampling: Any = vllm.SamplingParams
        self.repeats = repeats
        self.random = random.Random(7)
        self.llm = vllm.LLM(
            model=str(folder), load_format="dummy" if dummy else "auto",
            skip_tokenizer_init=True, dtype="bfloat16", mamba_ssm_cache_dtype="float32",
            gpu_memory_utilization=0.9, enable_prefix_caching=False, max_model_len=2048,
            max_num_seqs=1024, max_num_batched_tokens=16384, seed=7, disable_log_stats=True,
            compilation_config={"cudagraph_capture_sizes": [1, 8, 64, 128, 256, 512, 1024]},
            worker_extension_cls="vllm_kernels.Kernels")

    def generate(self, requests: int, prompt: int, new: int, **more: Any) -> None:
        """Other prompts each time."""
        draw = self.random.randrange
        prompts = [{"prompt_token_ids": [draw(3, 65536) for _ in range(prompt)]}
                   for _ in range(requests)]
        params = self.sampling(temperature=1.0, max_tokens=new, ignore_eos=True, detokenize=False,
                               flat_logprobs=True, **more)
        done = self.llm.generate(prompts, params, use_tqdm=False)
        assert all(len(one.outputs[0].token_ids) == new for one in done), "a completion was cut"

    def wall_s(self, *size: int, **more: Any) -> float:
        self.generate(*size, **more)
        return speed.median_s(lambda: self.generate(*size, **more), self.repeats)

    def gpu_s(self, *size: int, **more: Any) -> float:
        self.generate(*size, **more)
        self.llm.collective_rpc("kernels_begin")
        self.generate(*size, **more)
        seconds, largest = self.llm.collective_rpc("kernels_end")[0]
        speed.say(f"{size}: {seconds:.4f} s of kernels")
        for name, each in largest:
            speed.say(f"  {each:8.4f} s  {name}")
        return seconds


def main() -> int:
    args = arguments()
    for name, value in OFFLINE.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory() as made:
        folder = args.model or config_only(Path(made))
        measure(Peer(folder, args.model is None, args.repeats))
    return 0


def arguments() -> argparse.Namespace:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--model", type=Path, help="a folder that `gapscope model init` wrote "
                        "[default: the same shape with dummy weights]")
    parser.add_argument("--repeats", type=int, default=3, help="of each, the median [%(default)s]")
    return parser.parse_args()


def config_only(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(speed.JAMBA_3B))
    return folder


def measure(peer: Peer) -> None:
    """What the table leads with comes first."""
    recorded = {"logprobs": 0}

    def decode_gpu(requests: int, more: dict[str, int]) -> float:
        long = peer.gpu_s(requests, 1, PROFILED_STEPS + 1, **more)
        short = peer.gpu_s(requests, 1, 1, **more)
        return requests * PROFILED_STEPS / (long - short)

    for how, more in (("GPU-only", recorded), ("GPU-only, no logprobs", {})):
        for requests in DECODES:
            speed.attempt(peer.name, "decode", speed.decode_size(requests), how,
                          lambda r=requests, m=more: decode_gpu(r, m))
    for requests, prompt in PREFILLS:
        size, tokens = speed.prefill_size(requests, prompt), requests * prompt
        what = (requests, prompt, 1)
        speed.attempt(peer.name, "prefill", size, "wall",
                      lambda w=what, t=tokens: t / peer.wall_s(*w, **recorded))
        speed.attempt(peer.name, "prefill", size, "GPU-only",
                      lambda w=what, t=tokens: t / peer.gpu_s(*w, **recorded))
    # Prompt and completion of 128 tokens each, scored as a prompt.
    size, what = speed.whole_size(256, 128, 128), (256, 256, 1)
    scored = {"prompt_logprobs": 0}
    speed.attempt(peer.name, "score", size, "wall",
                  lambda: 256 * 256 / peer.wall_s(*what, **scored))
    speed.attempt(peer.name, "score", size, "GPU-only",
                  lambda: 256 * 256 / peer.gpu_s(*what, **scored))
    for requests in DECODES:
        size, what = speed.whole_size(requests, 128, 128), (requests, 128, 128)
        speed.attempt(peer.name, "generate", size, "wall",
                      lambda w=what: w[0] * 128 / peer.wall_s(*w, **recorded))


if __name__ == "__main__":
    sys.exit(main())
