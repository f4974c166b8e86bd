"""Prints the ten worst tokens of a run, one JSON object a line.

Usage: worst_tokens.py RUN. Needs the package polars.
"""

import sys

import polars as pl

run = sys.argv[1]
tokens = pl.scan_parquet(f"{run}/tokens/*.parquet")
gaps = tokens.with_columns(gap=(pl.col("logp_trainer") - pl.col("logp_decode")).abs())
worst = gaps.sort("gap", descending=True, nulls_last=True).head(10).collect()
print(worst.select("gap", "request_id", "position", "token_id").write_ndjson(), end="")
