"""Goldens for trainer::grpo: the loss on padded [batch, time] tensors, its gradient by autograd.

Needs: python >= 3.10, torch >= 2.4; the goldens name the versions that made them.
Run:   python tests/oracles/grpo_torch.py tests/fixtures/grpo/goldens.json

All arithmetic is float64. The loss is written as padded batches have it, so that the flat Rust
code shares neither layout nor order of sums with it.
"""

import json
import math
import sys

import torch

torch.set_default_dtype(torch.float64)


def advantages(rewards, group, scale):
    grouped = torch.tensor(rewards).view(-1, group)
    centred = grouped - grouped.mean(dim=1, keepdim=True)
    if scale:
        centred = centred / (grouped.std(dim=1, keepdim=True, unbiased=True) + 1e-6)
    return centred.flatten()


def padded(rows, fill):
    width = max(len(row) for row in rows)
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows])


def loss_terms(case):
    options = case["options"]
    new = padded(case["new"], 0.0).requires_grad_()
    old = padded(case["old"], 0.0)
    mask = padded(case["mask"], False).bool()
    advantage = torch.tensor(case["advantages"]).unsqueeze(1)

    def aggregate(values):
        kept = torch.where(mask, values, 0.0)
        if options["aggregation"] == "token_mean":
            return kept.sum() / mask.sum()
        lengths = mask.sum(dim=1)
        return (kept.sum(dim=1)[lengths > 0] / lengths[lengths > 0]).mean()

    ratio = torch.exp(new - old)
    clipped = torch.clamp(ratio, 1 - options["clip_low"], 1 + options["clip_high"])
    per_token = -torch.min(ratio * advantage, clipped * advantage)
    importance = None
    if options["importance_cap"] is not None:
        uncapped = torch.exp(old - padded(case["rollout"], 0.0))
        per_token = per_token * torch.clamp(uncapped, max=options["importance_cap"])
        importance = {
            "mean": torch.clamp(uncapped, max=options["importance_cap"])[mask].mean().item(),
            "uncapped_max": uncapped[mask].max().item(),
            "fraction_capped": (uncapped > options["importance_cap"])[mask].double().mean().item(),
        }
    policy_loss = aggregate(per_token)
    loss, kl = policy_loss, None
    if case["reference"] is not None:
        away = padded(case["reference"], 0.0) - new
        kl = aggregate(torch.exp(away) - away - 1)
        loss = loss + options["kl_coef"] * kl
    loss.backward()

    low = (ratio < 1 - options["clip_low"]) & (advantage < 0)
    high = (ratio > 1 + options["clip_high"]) & (advantage > 0)
    present = advantage.flatten()[mask.any(dim=1)]
    gradient = [row[: len(ids)] for row, ids in zip(new.grad.tolist(), case["new"])]
    return {
        "loss": loss.item(),
        "policy_loss": policy_loss.item(),
        "kl": None if kl is None else kl.item(),
        "approx_kl": (ratio - 1 - (new - old))[mask].mean().item(),
        "ratio_mean": ratio[mask].mean().item(),
        "ratio_min": ratio[mask].min().item(),
        "ratio_max": ratio[mask].max().item(),
        "clip_fraction_low": low[mask].double().mean().item(),
        "clip_fraction_high": high[mask].double().mean().item(),
        "importance": importance,
        "advantage_mean": present.mean().item(),
        "advantage_std": present.std(unbiased=False).item(),
        "gradient": gradient,
    }


def case(name, seed, *, rewards, group=4, scale=True, drift=0.3, lengths=(5, 3, 7, 1), masked=0.0,
         kl_coef=0.0, reference=False, cap=None, clip=(0.2, 0.28), aggregation="token_mean"):
    generator = torch.Generator().manual_seed(seed)

    def rows(scale_, centre=None):
        out = []
        for index, length in enumerate(lengths):
            noise = scale_ * torch.randn(length, generator=generator)
            base = torch.zeros(length) if centre is None else torch.tensor(centre[index])
            out.append((base + noise).tolist())
        return out

    old = [[-abs(x) - 0.05 for x in row] for row in rows(1.5)]
    new, ref, rollout = rows(drift, old), rows(0.4, old), rows(0.5, old)
    mask = [(torch.rand(n, generator=generator) >= masked).tolist() for n in lengths]
    made = {
        "name": name,
        "rewards": rewards,
        "group": group,
        "scale_advantages": scale,
        "options": {"clip_low": clip[0], "clip_high": clip[1], "kl_coef": kl_coef,
                    "importance_cap": cap, "aggregation": aggregation},
        "advantages": advantages(rewards, group, scale).tolist(),
        "mask": mask,
        "new": new,
        "old": old,
        "reference": ref if reference or kl_coef else None,
        "rollout": rollout if cap is not None else None,
    }
    made["expected"] = loss_terms(made)
    return made


def main(path):
    mixed = [1.0, 0.0, 0.25, 0.0]
    cases = [
        case("on policy", 1, rewards=mixed, drift=0.0),
        case("clipped on both sides", 2, rewards=mixed, drift=0.6),
        case("mostly negative advantages", 3, rewards=[0.0, 0.0, 0.0, 1.0], drift=0.6),
        case("advantages not scaled", 4, rewards=mixed, scale=False),
        case("sequence mean", 5, rewards=mixed, aggregation="sequence_mean"),
        case("kl", 6, rewards=mixed, kl_coef=0.05),
        case("kl, sequence mean", 7, rewards=mixed, kl_coef=0.2, aggregation="sequence_mean"),
        case("kl logged without a weight", 8, rewards=mixed, reference=True),
        case("importance cap", 9, rewards=mixed, cap=1.2),
        case("importance cap out of reach", 10, rewards=mixed, cap=1e9),
        case("masks", 11, rewards=mixed, masked=0.4),
        case("masks, sequence mean, one sequence empty", 112, rewards=mixed, masked=0.6,
             lengths=(5, 6, 7, 1), aggregation="sequence_mean"),
        case("equal rewards", 13, rewards=[0.1] * 4, drift=0.6),
        case("equal rewards, kl", 14, rewards=[0.1] * 4, kl_coef=0.1),
        case("two groups, everything", 15, rewards=[0.0, 1.0, 1.0, 0.5, 0.5, 0.5], group=3,
             lengths=(4, 9, 2, 6, 3, 5), drift=0.5, masked=0.3, kl_coef=0.02, cap=1.5,
             clip=(0.1, 0.3), aggregation="sequence_mean"),
    ]
    # The goldens must show what their names promise.
    expected = {made["name"]: made["expected"] for made in cases}
    both = expected["clipped on both sides"]
    assert both["clip_fraction_low"] > 0 and both["clip_fraction_high"] > 0
    assert 0 < expected["importance cap"]["importance"]["fraction_capped"] < 1
    assert expected["importance cap out of reach"]["importance"]["fraction_capped"] == 0
    assert any(not any(row) for row in cases[11]["mask"]) and math.isfinite(cases[11]["expected"]["loss"])
    with open(path, "w", encoding="utf-8") as out:
        json.dump({"made_with": {"torch": torch.__version__, "python": sys.version.split()[0]},
                   "cases": cases}, out, indent=1)
        out.write("\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
