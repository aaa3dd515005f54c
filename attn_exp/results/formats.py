"""A sweep's results in the formats of `format=`: a table for people, JSON, CSV and Markdown for programs and pages."""

from collections.abc import Sequence
from typing import Any

import msgspec

from attn_exp.core.safe_text import markdown_text
from attn_exp.core.text import grid
from attn_exp.results.result import Result
from attn_exp.results.table import csv_rows, csv_text, table

FORMATS = ("table", "json", "csv", "markdown")
# What a page has room for, beside the metrics of each pass.
_SHOWN = ("label", "status", "batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "dtype", "causal", "flags")
_METRICS = ("time_us", "time_half_width", "tflops")


def rendered(
    results: Sequence[Result], form: str, width: int, answer: Sequence[str] = (), columns: Sequence[str] = ()
) -> str:
    """Return the results in a format; JSON and Markdown have the lines of the answer, too.

    CSV has the columns of `table.csv`, JSON the same as numbers where they are numbers, without empty ones.
    """
    if form == "table":
        return table(results, width, columns)
    if form == "csv":
        return csv_text(results).rstrip("\n")
    columns_there, raw = csv_rows(results)
    rows = [{name: _text(row.get(name)) for name in columns_there} for row in raw]
    if form == "json":
        whole = {"answer": list(answer), "results": [_typed(row) for row in rows]}
        return msgspec.json.format(msgspec.json.encode(whole), indent=1).decode()
    names = [name for name in columns_there if name in _SHOWN or name.partition("/")[2] in _METRICS]
    filled = [name for name in names if any(row[name] for row in rows)]
    escaped = [{name: markdown_text(row[name]) for name in filled} for row in rows]
    return "\n\n".join(filter(None, ["  \n".join(answer), grid(escaped, filled, "pipe") if rows else "no records"]))


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _typed(row: dict[str, str]) -> dict[str, Any]:
    return {name: _number(value) for name, value in row.items() if value != ""}


def _number(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text
