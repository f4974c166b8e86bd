"""Goldens for the whole trainer: tests/fixtures/tiny-jamba in transformers' Jamba, f32, eager.

Ten supervised AdamW steps, and the gradient of GRPO minibatches, all by torch's autograd. Each
sequence runs alone: nothing here packs, pads or masks.

Needs: python >= 3.10, torch >= 2.4, transformers with Jamba; the goldens name the versions.
Run:   python tests/oracles/train_torch.py tests/fixtures/training/goldens.json
"""

import json
import pathlib
import sys

import torch
import transformers

FOLDER = pathlib.Path(__file__).parent.parent / "fixtures" / "tiny-jamba"
LENGTHS = [(3, 8), (1, 15), (9, 2), (6, 6), (4, 20), (12, 1)]  # prompt, completion
TRAINING = {"learning_rate": 3e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01,
            "max_grad_norm": 1.0, "warmup_steps": 4}
STEPS = 10


def load():
    return transformers.JambaForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32, attn_implementation="eager")


def draw(seed):
    generator = torch.Generator().manual_seed(seed)
    return [{"prompt_len": prompt,
             "tokens": torch.randint(3, 256, (prompt + rest,), generator=generator).tolist()}
            for prompt, rest in LENGTHS]


def log_probs(model, sequence, temperature=1.0):
    ids = torch.tensor([sequence["tokens"]])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float() / temperature
    picked = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0]
    return picked[sequence["prompt_len"] - 1:]


def norms(tensors):
    return {name: tensor.double().norm().item() for name, tensor in tensors}


def supervised():
    model = load()
    # One group, as the trainer decays every weight.
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=TRAINING["learning_rate"], betas=TRAINING["betas"],
        eps=TRAINING["eps"], weight_decay=TRAINING["weight_decay"])
    sequences, losses, grad_norms = draw(1), [], []
    for step in range(1, STEPS + 1):
        rate = TRAINING["learning_rate"] * min(1.0, step / TRAINING["warmup_steps"])
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = -torch.cat([log_probs(model, one) for one in sequences]).mean()
        loss.backward()
        losses.append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), TRAINING["max_grad_norm"])
        grad_norms.append(norm.item())
        optimizer.step()
    # The clip must act on some steps and leave others alone.
    assert min(grad_norms) < TRAINING["max_grad_norm"] < max(grad_norms), grad_norms
    return {"options": TRAINING, "sequences": sequences, "losses": losses,
            "weight_norms": norms(model.named_parameters())}


def grpo(name, seed, temperature, shift, importance_cap, aggregation):
    """`shift`: standard deviation of old and rollout about the model's own log-probabilities."""
    model, sequences = load(), draw(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        own = [log_probs(model, one, temperature) for one in sequences]

    def moved():
        return [one + shift * torch.randn(len(one), generator=generator) for one in own]

    old, rollout = moved(), moved()
    advantages = [1.5, -0.5, 2.0, -1.25, 0.25, -0.75]
    masks = [torch.rand(len(one), generator=generator) < 0.8 for one in own]
    low, high, cap = 0.2, 0.28, float("inf") if importance_cap is None else importance_cap
    losses = []
    for sequence, before, engine, advantage, mask in zip(sequences, old, rollout, advantages, masks):
        ratio = torch.exp(log_probs(model, sequence, temperature) - before)
        surrogate = torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        weight = torch.exp(before - engine).clamp(max=cap)
        if importance_cap is None:
            weight = torch.ones_like(weight)
        losses.append((-weight * surrogate)[mask])
    if aggregation == "token_mean":
        loss = torch.cat(losses).mean()
    else:
        loss = torch.stack([one.mean() for one in losses if len(one)]).mean()
    loss.backward()
    return {"name": name, "temperature": temperature, "sequences": sequences,
            "advantages": advantages, "masks": [one.tolist() for one in masks],
            "old": [one.tolist() for one in old], "rollout": [one.tolist() for one in rollout],
            "clip": [low, high], "importance_cap": importance_cap, "aggregation": aggregation,
            "loss": loss.item(),
            "grad_norms": norms((n, p.grad) for n, p in model.named_parameters())}


def main(path):
    torch.set_num_threads(1)
    cases = [
        grpo("old is the model's own", 2, 0.7, 0.0, None, "token_mean"),
        grpo("clipped and capped", 3, 0.7, 0.4, 1.2, "token_mean"),
        grpo("every sequence weighs the same", 4, 1.3, 0.2, None, "sequence_mean"),
    ]
    made_with = {"torch": torch.__version__, "transformers": transformers.__version__}
    with open(path, "w", encoding="utf-8") as out:
        json.dump({"made_with": made_with, "supervised": supervised(), "grpo": cases}, out)
        out.write("\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
