"""Reads a run that gapscope left, with polars and json alone."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
# With other values the run's logprobs are not those of the folder's weights in f32.
DEMANDS = {
    ("model", "dtype"): "f32",
    ("engine", "logprobs_mode"): "raw_logprobs",
    ("engine", "mamba_ssm_cache_dtype"): "f32",
    ("trainer", "update"): "none",
}


class Refused(Exception):
    """Nothing can be checked. The text says what was asked, what was found and what to do."""


@dataclass
class Request:
    """One completion. Each list of logprobs has an entry for each of its tokens."""

    name: str
    prompt: list[int]
    completion: list[int]
    prompt_text: str
    completion_text: str
    engine: list[float]
    trainer: list[float]
    hf: list[float] = field(default_factory=list)

    def diffs(self) -> list[float]:
        return [distance(a, b) for a, b in zip(self.engine, self.hf, strict=True)]

    def worst(self) -> float:
        return max(self.diffs(), default=0.0)

    def is_victim(self) -> bool:
        """By gapscope's own numbers."""
        return any(distance(a, b) > 0 for a, b in zip(self.engine, self.trainer, strict=True))


def distance(a: float, b: float) -> float:
    """|a - b|. What is not finite agrees with nothing."""
    return abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf


def model_folder(run: Path, given: Path | None) -> Path:
    """Where the weights are of a run that this script can judge."""
    try:
        config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"{run} is not the folder of a run: {error}") from error
    for (table, key), demanded in DEMANDS.items():
        if (found := config.get(table, {}).get(key)) != demanded:
            raise Refused(f"{run} has {table}.{key} = {found!r}: only {demanded!r} can be checked")
    named = given or config["model"].get("path")
    if named is None:
        raise Refused(f"{run} began from a preset's random weights, which are in no folder: write "
                      "them with `gapscope model init PRESET DIR --seed SEED`, run with model.path")
    # A relative path was relative to where gapscope ran, often the repository's root.
    for folder in (Path(named), REPOSITORY / named):
        if (folder / "config.json").is_file():
            return folder
    raise Refused(f"there is no model folder {named}, here or in {REPOSITORY}: pass it by --model")


def read_requests(run: Path) -> list[Request]:
    """Every completion of the run, its two tables checked against each other."""
    import polars as pl

    rollouts = read_table(run / "rollouts", "request_id", "prompt_token_ids", "prompt_text",
                          "completion_token_ids", "completion_text")
    tokens = read_table(run / "tokens", "request_id", "position", "token_id", "logp_decode",
                        "logp_trainer")
    if tokens.is_empty():
        raise Refused(f"{run} has no token to check")
    per_request = tokens.group_by("request_id").agg(pl.all().sort_by("position"))
    by_name = {row["request_id"]: row for row in per_request.iter_rows(named=True)}
    nothing: dict[str, list[Any]] = {"token_id": [], "logp_decode": [], "logp_trainer": []}
    requests = []
    for row in rollouts.iter_rows(named=True):
        name, own = row["request_id"], by_name.pop(row["request_id"], nothing)
        engine, trainer = own["logp_decode"], own["logp_trainer"]
        if own["token_id"] != row["completion_token_ids"]:
            raise Refused(f"rollouts and tokens of {run} differ in {name}: run phase 1 again")
        if None in engine + trainer:
            raise Refused(f"{name} has a token without logp_decode or logp_trainer")
        requests.append(Request(name, row["prompt_token_ids"], own["token_id"], row["prompt_text"],
                                row["completion_text"], engine, trainer))
    if by_name:
        raise Refused(f"{min(by_name)} is in the tokens of {run} alone: run phase 1 again")
    return requests


def read_table(folder: Path, *columns: str) -> Any:
    import polars as pl

    files = sorted(folder.glob("*.parquet"))
    if not files:
        raise Refused(f"{folder} has no Parquet file: no step of the run has ended")
    tables = []
    for file in files:
        try:
            tables.append(pl.read_parquet(file, columns=list(columns)))
        except (pl.exceptions.PolarsError, OSError) as error:
            raise Refused(f"{file} cannot be read, run phase 1 again: {error}") from error
    return pl.concat(tables)
