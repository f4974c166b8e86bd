#!/usr/bin/env python3
"""Trains tiny-jamba with PyTorch's FSDP and with gapscope, and compares the two.

    cargo build --release
    python3 experiments/peers/fsdp.py

Both shard tests/fixtures/tiny-jamba over two ranks, in f32. Compared are the logprobs before the
first update (of completions that gapscope sampled), the losses of ten supervised AdamW steps, and
every weight after them, each within 1e-4. PyTorch's side is `fully_shard` (FSDP2) around each layer
of transformers' JambaForCausalLM and around the whole, a process a rank: gloo on the CPU, NCCL with
--device cuda, which needs two GPUs. gapscope's side is two `gapscope run`, with trainer.ranks = 2
and, with --device cuda, engine.device = "cuda"; the supervised steps are its warm start.

Exit code: 0 all within the bound; 1 something is not; 2 nothing could be compared. Needs Python
3.10 or newer; packages that cannot be imported are installed into an environment of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import own_environment
import run_folder
from run_folder import REPOSITORY, Refused

MODEL = REPOSITORY / "tests/fixtures/tiny-jamba"
RANKS = 2
STEPS = 10
BOUND = 1e-4
# As gapscope's defaults.
RATE, BETAS, EPS, WEIGHT_DECAY, MAX_GRAD_NORM = 1e-3, (0.9, 0.95), 1e-8, 0.0, 1.0
BEGIN, END = 1, 2
# Of different lengths, five a step; a step takes up where the last one ended.
PROBLEMS = [("2+2", "4"), ("the longest question", "yes"), ("a", "an answer of some length"),
            ("12*12=", "144"), ("so", "on and on"), ("seven", "eight"), ("?", "!"),
            ("left", "right")]
BATCH = 5


def main() -> int:
    args = arguments()
    try:
        own_environment.enter(args.venv, ("polars", "torch", "transformers"),
                              Path(__file__).with_name("requirements.txt"))
        return 0 if compare(args.gapscope, args.device) else 1
    except (Refused, own_environment.NoEnvironment) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def arguments() -> argparse.Namespace:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--gapscope", type=Path, default=REPOSITORY / "target/release/gapscope",
                        help="the binary [%(default)s]")
    parser.add_argument("--venv", type=Path, default=REPOSITORY / "target/transformers-venv",
                        help="where missing packages are installed [%(default)s]")
    return parser.parse_args()


def compare(binary: Path, device: str) -> bool:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours = gapscope(binary, device, folder)
        theirs = fsdp(device, ours["sequences"], folder)
    pairs = [("logprobs before an update", flat(ours["logprobs"]), flat(theirs["logprobs"])),
             ("losses of ten steps", ours["losses"], theirs["losses"]),
             ("weights after them", *weights(ours["weights"], theirs["weights"]))]
    print(f"gapscope and FSDP over {RANKS} ranks, {device}, f32, {MODEL.relative_to(REPOSITORY)}")
    print(f"{theirs['versions']}")
    print("losses, gapscope: " + " ".join(f"{loss:.6f}" for loss in ours["losses"]))
    print("losses, FSDP:     " + " ".join(f"{loss:.6f}" for loss in theirs["losses"]))
    print(f"{'':28}{'numbers':>9}{'largest difference':>21}")
    good = True
    for what, one, other in pairs:
        if len(one) != len(other) or not one:
            raise Refused(f"{what}: {len(one)} of gapscope's and {len(other)} of FSDP's")
        worst = max(map(run_folder.distance, one, other))
        good &= worst <= BOUND
        print(f"{what:28}{len(one):9}{worst:21.2e}{'' if worst <= BOUND else '   TOO LARGE'}")
    return good


def flat(rows: list[list[float]]) -> list[float]:
    return [value for row in rows for value in row]


def weights(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[list[float], list[float]]:
    if ours.keys() != theirs.keys():
        raise Refused(f"weights of one side alone: {sorted(ours.keys() ^ theirs.keys())}")
    both = [(ours[name].flatten().tolist(), theirs[name].flatten().tolist()) for name in ours]
    return flat([one for one, _ in both]), flat([other for _, other in both])


# gapscope's side.


def gapscope(binary: Path, device: str, folder: Path) -> dict[str, Any]:
    """What two runs leave: one scores before any update, one takes the supervised steps."""
    from safetensors.torch import load_file

    lines = [json.dumps({"prompt": question, "answer": answer}) for question, answer in PROBLEMS]
    problems = folder / "problems.jsonl"
    problems.write_text("\n".join(lines), encoding="utf-8")
    scored, trained = folder / "scored", folder / "trained"
    run(binary, device, problems, scored, [])
    # A rate of 0 leaves the weights as the warm start has left them.
    run(binary, device, problems, trained, [
        f"trainer.warm_start.steps={STEPS}", f"trainer.warm_start.batch={BATCH}",
        f"trainer.warm_start.learning_rate={RATE}", "checkpoint.save_final=true"])
    requests = run_folder.read_requests(scored)
    final = trained / "checkpoints/final/model.safetensors"
    return {
        "sequences": [(len(one.prompt), one.prompt + one.completion) for one in requests],
        "logprobs": [one.trainer for one in requests],
        "losses": scalars(trained / "tb", "warm_start/loss"),
        "weights": load_file(final),
    }


def run(binary: Path, device: str, problems: Path, out: Path, sets: list[str]) -> None:
    experiment = out.with_suffix(".toml")
    experiment.write_text("name = \"fsdp\"\n", encoding="utf-8")
    sets = [f"model.path={MODEL}", "model.dtype=f32", f"engine.device={device}",
            "engine.num_gpu_blocks_override=64", "engine.max_model_len=64", "steps=1",
            "rollout.prompts_per_step=4", "rollout.rollouts_per_prompt=2",
            "rollout.max_new_tokens=12", "rollout.ignore_eos=true", "task.kind=jsonl",
            f"task.path={problems}", "task.reward=exact", f"trainer.ranks={RANKS}",
            f"trainer.betas={list(BETAS)}", f"trainer.eps={EPS}",
            f"trainer.weight_decay={WEIGHT_DECAY}", f"trainer.max_grad_norm={MAX_GRAD_NORM}",
            "trainer.learning_rate=0.0", *sets]
    command = [str(binary), "run", str(experiment), "--out", str(out)]
    for one in sets:
        command += ["--set", one]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    except OSError as error:
        raise Refused(f"{binary}: {error}; build it, or name another with --gapscope") from error
    if done.returncode:
        raise Refused(f"gapscope has failed: {done.stderr.strip().splitlines()[-1]}")


def scalars(folder: Path, tag: str) -> list[float]:
    """A tag's values in an event file of TensorBoard, in the order of their steps."""
    [file] = folder.glob("events.out.tfevents.*")
    values, rest = [], file.read_bytes()
    while rest:
        # Length, its checksum, the event, its checksum.
        [length] = struct.unpack_from("<Q", rest)
        event, rest = rest[12:12 + length], rest[16 + length:]
        for summary in fields(event, 5):
            for value in fields(summary, 1):
                if fields(value, 1) == [tag.encode()]:
                    values += [struct.unpack("<f", one)[0] for one in fields(value, 2)]
    return values


def fields(message: bytes, number: int) -> list[bytes]:
    """A field's contents in a message of Protocol Buffers."""
    found, at = [], 0
    while at < len(message):
        key, at = varint(message, at)
        kind = key & 7
        if kind == 0:
            start = at
            _, at = varint(message, at)
        else:
            length, start = (varint(message, at) if kind == 2 else ({1: 8, 5: 4}[kind], at))
            at = start + length
        if key >> 3 == number:
            found.append(message[start:at])
    return found


def varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at


# FSDP's side.


def fsdp(device: str, sequences: list[tuple[int, list[int]]], folder: Path) -> dict[str, Any]:
    import torch
    import torch.multiprocessing as multiprocessing

    if device == "cuda" and torch.cuda.device_count() < RANKS:
        raise Refused(f"{RANKS} ranks need as many GPUs, and {torch.cuda.device_count()} are here")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    result = folder / "fsdp.pt"
    multiprocessing.spawn(rank_main, args=(device, sequences, result), nprocs=RANKS)
    return torch.load(result)


def rank_main(rank: int, device: str, sequences: list[tuple[int, list[int]]], out: Path) -> None:
    import torch
    import torch.distributed as dist
    import transformers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=RANKS)
    mesh = init_device_mesh(device, (RANKS,))
    model = transformers.JambaForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32, attn_implementation="eager").to(device)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with torch.no_grad():
        before = [one.tolist() for one in log_probs(model, sequences[rank::RANKS], device)]
    # FSDP keeps the outermost unit whole for the backward, which did not come.
    model.reshard()
    losses = train(model, rank, device)
    whole = {name: tensor.full_tensor().cpu() for name, tensor in model.named_parameters()}
    parts: list[Any] = [None] * RANKS
    dist.all_gather_object(parts, before)
    if rank == 0:
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
        logprobs = [parts[at % RANKS][at // RANKS] for at in range(len(sequences))]
        torch.save({"logprobs": logprobs, "losses": losses, "weights": whole,
                    "versions": versions}, out)
    dist.destroy_process_group()


def log_probs(model: Any, sequences: list[tuple[int, list[int]]], device: str) -> list[Any]:
    """Of each completion's tokens. One forward; what is padded behind a sequence, it never sees."""
    import torch

    longest = max(len(tokens) for _, tokens in sequences)
    padded = [tokens + [0] * (longest - len(tokens)) for _, tokens in sequences]
    ids = torch.tensor(padded, device=device)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    picked = torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None])[:, :, 0]
    return [row[prompt_len - 1:len(tokens) - 1]
            for row, (prompt_len, tokens) in zip(picked, sequences, strict=True)]


def train(model: Any, rank: int, device: str) -> list[float]:
    import torch
    import torch.distributed as dist

    # One group: gapscope decays every weight.
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, eps=EPS,
                                  weight_decay=WEIGHT_DECAY)
    losses = []
    for step in range(STEPS):
        rows = [PROBLEMS[(step * BATCH + i) % len(PROBLEMS)] for i in range(BATCH)]
        sequences = [(1 + len(question.encode()),
                      [BEGIN, *question.encode(), *answer.encode(), END])
                     for question, answer in rows]
        count = sum(len(tokens) - prompt_len for prompt_len, tokens in sequences)
        optimizer.zero_grad()
        total = -torch.cat(log_probs(model, sequences[rank::RANKS], device)).sum() / count
        # FSDP takes the mean of its ranks' gradients.
        (total * RANKS).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        loss = total.detach().clone()
        dist.all_reduce(loss)
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    sys.exit(main())
