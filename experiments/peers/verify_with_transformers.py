#!/usr/bin/env python3
"""Scores a run's completions with Hugging Face transformers, for whoever does not trust gapscope.

Phase 1:  gapscope run experiments/two_phase.toml
Phase 2:  python3 experiments/peers/verify_with_transformers.py runs/two-phase

Reads the run's config.json, rollouts, tokens and model folder; none of gapscope's code. The logprob
of every sampled token is computed again by JambaForCausalLM on the CPU, in f32 with eager attention
and no padding. The requests that mismatch are compared with gapscope's own victims: those with a
token whose logp_decode and logp_trainer are not the same float.

transformers adds in another order, so that a healthy request differs a little too. A request agrees
while its largest |engine - HF| is below a tenth of the threshold, mismatches from ten thresholds
on, and is too close to call in between. On two_phase.toml 1,010 healthy requests stay below 6.1e-5
nats and 14 victims begin at 1.47; the default threshold, 0.01, lies between.

Exit code: 0 both name the same requests and none is too close to call; 1 they do not; 2 nothing
could be checked. Needs Python 3.10 or newer. Where torch, transformers or polars cannot be
imported, all three are installed from PyPI into an environment of their own: about 6 GB, once.
"""

from __future__ import annotations

import argparse
import math
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import own_environment
import run_folder
from run_folder import REPOSITORY, Refused, Request

ROWS_PER_FORWARD = 128


def main() -> int:
    args = arguments()
    try:
        own_environment.enter(args.venv, ("polars", "torch", "transformers"),
                              Path(__file__).with_name("requirements.txt"))
        return 0 if verify(args.run, args.model, args.threshold, args.out) else 1
    except (Refused, own_environment.NoEnvironment) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def arguments() -> argparse.Namespace:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a run")
    parser.add_argument("--model", type=Path, help="its model folder, if config.json's is not here")
    parser.add_argument("--threshold", type=positive, default=0.01, help="nats [%(default)s]")
    parser.add_argument("--out", type=Path, help="a file that gets what is printed too")
    parser.add_argument("--venv", type=Path, default=REPOSITORY / "target/transformers-venv",
                        help="where missing packages are installed [%(default)s]")
    return parser.parse_args()


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError(f"{text} is not above 0")
    return value


def verify(run: Path, model: Path | None, threshold: float, out: Path | None) -> bool:
    """Whether transformers and gapscope name the same requests."""
    folder = run_folder.model_folder(run, model)
    requests = run_folder.read_requests(run)
    try:
        if out:
            out.write_text("")  # A bad path fails before the work.
    except OSError as error:
        raise Refused(f"--out: {error}") from error
    hf = load_model(folder)
    print(f"scoring {len(requests)} requests with transformers", file=sys.stderr, flush=True)
    score(hf, requests)
    text, same = report(hf, folder, requests, threshold)
    print(text, end="")
    if out:
        out.write_text(text, encoding="utf-8")
    return same


def load_model(folder: Path) -> Any:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        loaded: Any = transformers.JambaForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", use_mamba_kernels=False,
            local_files_only=True, output_loading_info=True)
    except Exception as error:  # Of many kinds, and all say that the folder is at fault.
        raise Refused(f"transformers cannot load {folder}: {error}") from error
    model, trouble = loaded
    if any(trouble.values()):
        raise Refused(f"{folder} does not hold a JambaForCausalLM: {trouble}")
    return model


def score(model: Any, requests: list[Request]) -> None:
    """Fills in `hf`. The rows of one forward are equally long, so that none is padded."""
    import torch

    def lengths(one: Request) -> tuple[int, int]:
        return len(one.prompt), len(one.completion)

    largest = max(max(one.prompt + one.completion) for one in requests)
    if largest >= model.config.vocab_size:
        raise Refused(f"token {largest} is not one of the model's {model.config.vocab_size}: pass "
                      "the model that the run had by --model")
    for (prompt_len, _), same in groupby(sorted(requests, key=lengths), lengths):
        rows = list(same)
        for start in range(0, len(rows), ROWS_PER_FORWARD):
            batch = rows[start:start + ROWS_PER_FORWARD]
            ids = torch.tensor([one.prompt + one.completion for one in batch])
            with torch.no_grad():
                logits = model(input_ids=ids, use_cache=False).logits
            # The logits at a position are about the token after it.
            logps = logits[:, prompt_len - 1:-1].log_softmax(-1)
            sampled = logps.gather(2, ids[:, prompt_len:, None]).squeeze(2)
            for one, hf in zip(batch, sampled.tolist(), strict=True):
                one.hf = hf


def report(
    model: Any, folder: Path, requests: list[Request], threshold: float
) -> tuple[str, bool]:
    """What is printed, and whether transformers and gapscope name the same requests."""
    import torch
    import transformers

    near, far = threshold / 10, threshold * 10
    agreeing = [one for one in requests if one.worst() < near]
    unclear = [one for one in requests if near <= one.worst() < far]
    mismatching = [one for one in requests if one.worst() >= far]
    found = {one.name for one in mismatching}
    victims = {one.name for one in requests if one.is_victim()}
    same = found == victims and not unclear

    lines = [f"transformers {transformers.__version__}, torch {torch.__version__}",
             f"weights {folder}",
             f"{len(requests)} requests, {sum(len(one.hf) for one in requests)} tokens", ""]
    if mismatching or unclear:
        lines += [f"{'request':10} {'prompt':10}  at  token      engine          HF diff"]
    for one in mismatching + unclear:
        tokens = zip(one.completion, one.engine, one.hf, one.diffs(), strict=True)
        lines += [f"{one.name:10} {tail(one.prompt_text):10} {at:3} {token:6} {engine:11.6f} "
                  f"{hf:11.6f} {diff:.6f}" for at, (token, engine, hf, diff) in enumerate(tokens)
                  if diff >= near]
    if mismatching:
        lines += ["", f"{len(mismatching)} requests mismatch:"]
    for one in mismatching:
        lines += [f"{one.name}  {tail(one.prompt_text)}  largest diff {one.worst():.3f}",
                  f"    engine {one.completion_text!r}",
                  f"    HF     {greedy(model, folder, one)!r}"]
    lines += [""]
    lines += [f"too close to call: {one.name}, largest diff {one.worst():.2g}" for one in unclear]
    lines += [f"named by transformers alone: {name}" for name in sorted(found - victims)]
    lines += [f"named by gapscope alone: {name}" for name in sorted(victims - found)]
    for kind, these in (("agree", agreeing), ("mismatch", mismatching)):
        worst = sorted(one.worst() for one in these)
        span = f", largest diffs from {worst[0]:.2g} to {worst[-1]:.2g} nats" if worst else ""
        lines += [f"{len(these)} requests {kind}{span}"]
    verdict = "the same requests" if same else "NOT the same requests"
    lines += [f"transformers names {len(found)}, gapscope names {len(victims)}: {verdict}"]
    return "\n".join(lines) + "\n", same


def tail(text: str) -> str:
    """The end of a prompt, on one line."""
    return " ".join(text.split())[-24:]


def greedy(model: Any, folder: Path, request: Request) -> str:
    """What transformers itself answers at temperature 0, as many tokens as the engine did."""
    import torch
    import transformers

    ids = list(request.prompt)
    for _ in request.completion:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
    answer = ids[len(request.prompt):]
    if (folder / "tokenizer.json").is_file():
        return str(transformers.AutoTokenizer.from_pretrained(folder).decode(answer))
    # Without a tokenizer an id is a byte.
    return "".join("<eos>" if id == model.config.eos_token_id else chr(id) for id in answer)


if __name__ == "__main__":
    sys.exit(main())
