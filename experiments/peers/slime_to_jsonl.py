#!/usr/bin/env python3
"""Turns slime's or miles' dumps into lines that `gapscope audit --rollouts` reads.

usage: slime_to_jsonl.py DUMP OUT

DUMP holds rollout_data/N.pt and, where the trainer's side was dumped too, train_data/N.pt: pickles of
torch, so that torch is needed here and not in gapscope. Only files you trust: a pickle runs code.

With both sides OUT becomes token_exports/step_N/rank_0.jsonl, prime-rl's lines: a sample's `index` is the
other side's `sample_index`, log-probabilities are of the response alone, and what stands before it is
masked out. Without the trainer's side OUT becomes rollout_samples-N.jsonl, torchtitan's lines, which
gapscope compares with --model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch


class Refused(Exception):
    pass


def main(dump: Path, out: Path) -> None:
    rollouts = sorted((dump / "rollout_data").glob("*.pt"), key=lambda path: number(path))
    if not rollouts:
        raise Refused(f"{dump}/rollout_data holds no N.pt")
    for path in rollouts:
        step, samples = number(path), load(path)
        trained = dump / "train_data" / path.name
        if trained.exists():
            others = {one["sample_index"]: one for one in load(trained)}
            folder = out / "token_exports" / f"step_{step}"
            lines = [both(step, sample, others) for sample in samples]
            write(folder / "rank_0.jsonl", lines)
            (folder / "STABLE").touch()
        else:
            write(out / f"rollout_samples-{step}.jsonl", [engine_alone(one) for one in samples])


def number(path: Path) -> int:
    if not path.stem.isdigit():
        raise Refused(f"{path}: its name is no rollout id; dumps of evaluations are not read")
    return int(path.stem)


def load(path: Path) -> list[dict]:
    samples = torch.load(path, map_location="cpu", weights_only=False)["samples"]
    return [one if isinstance(one, dict) else vars(one) for one in samples]


def plain(values: object) -> list:
    return values.tolist() if isinstance(values, torch.Tensor) else list(values)


def response(sample: dict) -> tuple[list[int], int, list[float]]:
    """Tokens, how many of them are the prompt's, and the engine's log-probabilities of the rest."""
    tokens, length = plain(sample["tokens"]), int(sample["response_length"])
    if sample.get("rollout_log_probs") is None:
        raise Refused(f"sample {sample.get('index')} has no rollout_log_probs")
    values = plain(sample["rollout_log_probs"])
    if len(values) != length or length > len(tokens):
        raise Refused(f"sample {sample.get('index')}: {len(tokens)} tokens, a response of {length}, "
                      f"and {len(values)} log-probabilities")
    return tokens, len(tokens) - length, values


def both(step: int, sample: dict, others: dict) -> dict:
    tokens, prompt, engine = response(sample)
    other = others.get(sample["index"])
    if other is None:
        raise Refused(f"sample {sample['index']} is not in train_data")
    if plain(other["tokens"]) != tokens:
        raise Refused(f"sample {sample['index']}: the two sides' tokens differ")
    trainer = plain(other["log_probs"])
    mask = plain(sample["loss_mask"]) if sample.get("loss_mask") is not None else [1] * len(engine)
    if not len(trainer) == len(mask) == len(engine):
        raise Refused(f"sample {sample['index']}: {len(engine)} log-probabilities of the engine, "
                      f"{len(trainer)} of the trainer, a mask of {len(mask)}")
    before = [None] * prompt
    return {
        "schema_version": 1, "step": step, "rank": 0, "export_sequence_idx": sample["index"],
        "token_ids": tokens, "loss_mask": [0] * prompt + [int(one) for one in mask],
        "inference_logprobs": before + engine, "trainer_logprobs": before + trainer}


def engine_alone(sample: dict) -> dict:
    tokens, prompt, engine = response(sample)
    return {"rollout_id": sample["index"], "turns": [{
        "turn_id": 0, "prompt_token_ids": tokens[:prompt], "completion_token_ids": tokens[prompt:],
        "completion_logprobs": engine}]}


def write(path: Path, lines: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"{path}: {len(lines)} samples")


if len(sys.argv) != 3:
    sys.exit(__doc__)
try:
    main(Path(sys.argv[1]), Path(sys.argv[2]))
except Refused as refused:
    sys.exit(f"error: {refused}")
