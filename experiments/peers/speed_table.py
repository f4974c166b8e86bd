#!/usr/bin/env python3
"""Puts gapscope's rates and its peers' side by side, with their ratios, as Markdown.

    gapscope bench experiments/h200/bench.toml > bench.txt
    gapscope bench experiments/h200/bench.toml --products >> bench.txt
    python3 experiments/peers/vllm_speed.py > vllm.jsonl
    python3 experiments/peers/transformers_speed.py > transformers.jsonl
    python3 experiments/peers/matmul_speed.py > matmul.jsonl
    python3 experiments/peers/speed_table.py bench.txt vllm.jsonl transformers.jsonl matmul.jsonl

A ratio is gapscope's rate over the peer's. gapscope's rates are wall clock throughout.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import speed

REQUESTS = re.compile(r"requests +(\d+) a step, ([\d.]+) \+ ([\d.]+) tokens on average")
RATE = re.compile(r"(decode|prefill|generate|score|train) +(\d+) (?:sampled )?tokens/s +"
                  r"([\d.]+)% of the floor's (\d+)(?:, steps of (\d+) decodes alone)?")
HOST = re.compile(r"host work +(\d+) us")
PRODUCT = re.compile(r"product +(\d+ x \d+ x \d+) +([\d.]+) us")
UNITS = {"decode": "sampled tokens/s", "generate": "sampled tokens/s", "prefill": "tokens/s",
         "score": "tokens/s"}

Key = tuple[str, str]


@dataclass
class Own:
    """What gapscope printed."""

    rates: dict[Key, tuple[float, float]] = field(default_factory=dict)
    host_us: dict[str, str] = field(default_factory=dict)
    products: dict[str, float] = field(default_factory=dict)


def main() -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("bench", type=Path, help="what gapscope bench printed")
    parser.add_argument("peers", type=Path, nargs="*", help="what the peers' scripts printed")
    args = parser.parse_args()
    own = read_own(args.bench.read_text())
    rows = [json.loads(line) for file in args.peers for line in file.read_text().splitlines()
            if line.startswith('{"peer": ')]
    print(rates_table(own, [row for row in rows if row["work"] != "product"]))
    products = [row for row in rows if row["work"] == "product"]
    if own.products and products:
        print(products_table(own, products))
    for row in rows:
        if "error" in row:
            print(f"{row['peer']}, {row['work']} {row['size']}: {row['error']}")
    return 0


def read_own(text: str) -> Own:
    own = Own()
    requests, prompt, new, decodes = 0, 0, 0, ""
    for line in text.splitlines():
        if found := REQUESTS.match(line):
            requests = int(found[1])
            prompt, new = (round(float(found[part])) for part in (2, 3))
        elif found := RATE.match(line):
            work, rate, floor = found[1], float(found[2]), float(found[4])
            if work == "decode":
                decodes = found[5]
            # With completions behind it a prefill is the first engine step alone.
            if work == "train" or work == "prefill" and new > 1 or work == "generate" and new == 1:
                continue
            size = {"decode": speed.decode_size(int(decodes or 0)),
                    "prefill": speed.prefill_size(requests, prompt)}
            whole = speed.whole_size(requests, prompt, new)
            own.rates[work, size.get(work, whole)] = (rate, floor)
        elif found := HOST.match(line):
            own.host_us[decodes] = found[1]
        elif found := PRODUCT.match(line):
            own.products[found[1]] = float(found[2])
    return own


def rates_table(own: Own, rows: list[dict[str, Any]]) -> str:
    columns = unique(f"{row['peer']}, {row['how']}" for row in rows)
    values = {(row["work"], row["size"], f"{row['peer']}, {row['how']}"): row.get("tokens_per_s")
              for row in rows}
    order = list(UNITS)
    keys = unique([*own.rates, *((row["work"], row["size"]) for row in rows)])
    keys.sort(key=lambda key: order.index(key[0]))
    head = ["work", "size", "gapscope", "floor", "of the floor", "host, us a step"]
    for column in columns:
        head += [column, "ratio"]
    lines = [head, ["---"] * len(head)]
    for key in keys:
        work, size = key
        rate, floor = own.rates.get(key, (None, None))
        share = f"{100 * rate / floor:.0f}%" if rate and floor else "-"
        host = own.host_us.get(size, "-") if work == "decode" else "-"
        cells = [f"{work}, {UNITS[work]}", size, number(rate), number(floor), share, host]
        for column in columns:
            value = values.get((work, size, column))
            cells += [number(value), f"{rate / value:.2f}" if rate and value else "-"]
        lines.append(cells)
    return markdown(lines)


def products_table(own: Own, rows: list[dict[str, Any]]) -> str:
    columns = unique(f"{row['peer']}, {row['how']}" for row in rows)
    values = {(row["size"], f"{row['peer']}, {row['how']}"): row["us"] for row in rows}
    head = ["product, rows x outputs x inner", "gapscope, us"]
    for column in columns:
        head += [f"{column}, us", "ratio"]
    lines = [head, ["---"] * len(head)]
    for size, us in own.products.items():
        cells = [size, f"{us:.1f}"]
        for column in columns:
            value = values.get((size, column))
            cells += [f"{value:.1f}", f"{value / us:.2f}"] if value else ["-", "-"]
        lines.append(cells)
    return markdown(lines)


def unique(items: Any) -> list[Any]:
    return list(dict.fromkeys(items))


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def markdown(lines: list[list[str]]) -> str:
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


if __name__ == "__main__":
    sys.exit(main())
