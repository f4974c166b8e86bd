"""Loads model folders with transformers and prints what it makes of them, as JSON.

Run:   python tests/readers/load_transformers.py IDS FOLDER...
       python tests/readers/load_transformers.py --config FOLDER

IDS is a JSON list of rows of token ids. A folder's logits are [row][position][vocabulary], f32,
each row alone.
"""

import json
import sys

import torch
import transformers


def load(folder, rows):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", attn_implementation="eager",
        experts_implementation="eager", output_loading_info=True)
    tied = model.get_input_embeddings().weight.data_ptr() == model.lm_head.weight.data_ptr()
    with torch.no_grad():
        logits = [model(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in rows]
    return {
        "class": type(model).__name__,
        "dtype": str(model.dtype),
        "tied": tied,
        "trouble": {key: sorted(map(str, value)) for key, value in info.items() if value},
        "logits": [one.float().tolist() for one in logits],
        "eos": model.generation_config.eos_token_id,
    }


def config(folder):
    found = transformers.AutoConfig.from_pretrained(folder)
    kinds = found.layers_block_type
    return {
        "class": type(found).__name__,
        "mamba": kinds.count("mamba"),
        "attention": [layer for layer, kind in enumerate(kinds) if kind == "attention"],
        "experts": max(found.layers_num_experts),
        "dt_rank": found.mamba_dt_rank,
        "tied": found.tie_word_embeddings,
    }


def main(first, *folders):
    if first == "--config":
        found = [config(folder) for folder in folders]
    else:
        found = [load(folder, json.loads(first)) for folder in folders]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
