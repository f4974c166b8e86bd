"""Goldens for trainer::adamw: torch.optim.AdamW with a linear warm-up and clip_grad_norm_.

Needs: python >= 3.10, torch >= 2.4; the goldens name the versions that made them.
Run:   python tests/oracles/adamw_torch.py tests/fixtures/adamw/goldens.json

Start weights and gradients are float32 numbers; torch computes in float64, so that the bound in
the Rust test counts the roundings of the f32 master weights and moments and nothing else.
"""

import json
import math
import sys

import torch

STEPS = 20
SHAPES = [17, 1, 8]


def run(name, seed, *, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
        max_grad_norm=None, warmup_steps=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(scale, n):
        return (scale * torch.randn(n, generator=generator, dtype=torch.float32)).double()

    params = [torch.nn.Parameter(draw(0.5, n)) for n in SHAPES]
    start = [p.detach().tolist() for p in params]
    optimizer = torch.optim.AdamW(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    gradients, norms, rates = [], [], []
    for step in range(1, STEPS + 1):
        for p in params:
            p.grad = draw(0.2 + 0.1 * (step % 3), len(p))
        gradients.append([p.grad.tolist() for p in params])
        limit = math.inf if max_grad_norm is None else max_grad_norm
        norms.append(torch.nn.utils.clip_grad_norm_(params, limit).item())
        rates.append(lr * min(1.0, step / warmup_steps) if warmup_steps else lr)
        optimizer.param_groups[0]["lr"] = rates[-1]
        optimizer.step()
    state = [optimizer.state[p] for p in params]
    return {
        "name": name,
        "options": {"learning_rate": lr, "betas": list(betas), "eps": eps,
                    "weight_decay": weight_decay, "max_grad_norm": max_grad_norm,
                    "warmup_steps": warmup_steps},
        "start": start,
        "gradients": gradients,
        "norms": norms,
        "rates": rates,
        "master": [p.detach().tolist() for p in params],
        "m": [s["exp_avg"].tolist() for s in state],
        "v": [s["exp_avg_sq"].tolist() for s in state],
    }


def main(path):
    cases = [
        run("plain", 1),
        run("decay", 2, weight_decay=0.1),
        run("clip", 3, max_grad_norm=1.0),
        run("clip that is never reached", 4, max_grad_norm=1e3),
        run("decay, clip, warm-up, other betas", 5, weight_decay=0.01, max_grad_norm=0.7,
            warmup_steps=8, betas=(0.8, 0.95), eps=1e-6, lr=3e-2),
    ]
    # The clip must act on some steps and leave others alone.
    assert min(cases[2]["norms"]) < 1.0 < max(cases[2]["norms"]) < 1e3
    with open(path, "w", encoding="utf-8") as out:
        json.dump({"made_with": {"torch": torch.__version__, "python": sys.version.split()[0]},
                   "cases": cases}, out)
        out.write("\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
