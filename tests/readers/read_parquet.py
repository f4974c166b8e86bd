"""Prints what polars and DuckDB find in Parquet files, as one JSON object: reader -> schema and
rows of each file, in the order given.

Usage: read_parquet.py FILE... Needs the packages polars and duckdb.
"""

import json
import math
import sys

import duckdb
import polars


def plain(value):
    """JSON has no NaN and no infinities: they are written as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"nan": "NaN"}.get(str(value), str(value))
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def with_polars(path):
    frame = polars.read_parquet(path)
    schema = [[name, str(dtype)] for name, dtype in frame.schema.items()]
    return {"schema": schema, "rows": [plain(row) for row in frame.rows()]}


def with_duckdb(path):
    relation = duckdb.read_parquet(path)
    schema = [[name, str(dtype)] for name, dtype in zip(relation.columns, relation.types)]
    return {"schema": schema, "rows": [plain(row) for row in relation.fetchall()]}


def main(*paths):
    readers = {"polars": with_polars, "duckdb": with_duckdb}
    result = {name: [read(path) for path in paths] for name, read in readers.items()}
    json.dump(result, sys.stdout, allow_nan=False)


main(*sys.argv[1:])
