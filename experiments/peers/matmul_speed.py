#!/usr/bin/env python3
"""Times torch.matmul at every product of the shape of Jamba-3B, in bf16, one JSON line each.

    python3 experiments/peers/matmul_speed.py > matmul.jsonl

`gapscope bench experiments/h200/bench.toml --products` times the same with gapscope's own. As
there, a weight is one of many copies that no cache holds together, the products are queued one
after another, and the best of ten rounds counts. "graph" is the same from a CUDA graph, which a
call's own cost on the host does not slow down.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import speed

# Outputs and inner size: head, in, x, dt and out projections, gate with up, down, query with key
# and value, and the attention's output.
SHAPES = ((65536, 2560), (10240, 2560), (192, 5120), (5120, 160), (2560, 5120), (16384, 2560),
          (2560, 8192), (2816, 2560), (2560, 2560))
ROWS = (64, 256, 1024, 8192)
WEIGHTS_BYTES = 128 << 20
CALLS = 200
ROUNDS = 10


def main() -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=as_written).parse_args()
    import torch

    peer = f"torch {torch.__version__}"
    for outputs, inner in SHAPES:
        copies = -(-WEIGHTS_BYTES // (outputs * inner * 2))
        weights = [torch.rand(outputs, inner, device="cuda", dtype=torch.bfloat16) - 0.5
                   for _ in range(copies)]
        for rows in ROWS:
            x = torch.rand(rows, inner, device="cuda", dtype=torch.bfloat16) - 0.5
            size = speed.product_size(rows, outputs, inner)
            for how, round in (("queued", queued(x, weights)), ("graph", graph(x, weights))):
                us = best_s(round) / CALLS * 1e6
                tflops = 2e-6 * rows * outputs * inner / us
                speed.emit(peer, "product", size, how, us=round_to(us), tflops=round_to(tflops))
    return 0


def queued(x: Any, weights: list[Any]) -> Callable[[], None]:
    import torch

    def calls() -> None:
        for call in range(CALLS):
            torch.matmul(x, weights[call % len(weights)].T)

    return calls


def graph(x: Any, weights: list[Any]) -> Callable[[], None]:
    import torch

    calls = queued(x, weights)
    calls()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        calls()
    return captured.replay


def best_s(round: Callable[[], None]) -> float:
    import torch

    best = float("inf")
    for _ in range(ROUNDS + 1):  # The first warms up, and is never the best.
        torch.cuda.synchronize()
        start = time.perf_counter()
        round()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def round_to(value: float) -> float:
    return float(f"{value:.4g}")


if __name__ == "__main__":
    sys.exit(main())
