"""Changes one request's rows in a file of tokens.

Usage: change_tokens.py FILE REQUEST COLUMN=SQL...
Needs the package polars. Each expression is computed from the rows as they were.
"""

import sys

import polars as pl

path, request, *changes = sys.argv[1:]
rows = pl.read_parquet(path)
chosen = pl.col("request_id") == request
assert rows.filter(chosen).height > 0, f"{path} has no request {request}"
new = []
for change in changes:
    column, sql = change.split("=", 1)
    value = pl.sql_expr(sql).cast(rows.schema[column])
    new.append(pl.when(chosen).then(value).otherwise(column).alias(column))
rows.with_columns(new).write_parquet(path)
