"""python bench/pages_cost.py SWEEP_FOLDER: what pages cost, and what their order costs, from a sweep of a paged cache.

The sweep is `python -m attn_exp -m +experiment=serving`, or another that varies `page_size` and `pages`. For each
backend and shape this prints the time of each cache over that of keys that lie behind each other, and of each order of
pages over `linear`, with the 95 % confidence interval of a comparison between rows.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attn_exp.comparison.answer import spreads_for
from attn_exp.comparison.ratio import ratio
from attn_exp.core.errors import UserError
from attn_exp.core.sheet.render import grid
from attn_exp.core.sheet.sheet import sheet_of
from attn_exp.results.cell import Cell, ChosenMetric, cells_of
from attn_exp.results.read import read_folder
from attn_exp.results.result import Result, by_options

METRIC = ChosenMetric("time_us", "forward")


def rows(results: Sequence[Result]) -> list[dict[str, str]]:
    """Return a row for each measured cache that has another one to be compared with.

    Raises:
        UserError: there is none.
    """
    spreads = spreads_for(results, None)
    shapes: dict[Any, dict[tuple[int | None, str | None], Cell]] = defaultdict(dict)
    for cell in cells_of([one for one in by_options(results) if one.status == "ok"], METRIC):
        case = cell.result.case
        without = replace(case, page_size=None)
        shapes[cell.result.label, cell.result.model, without, case.cache_dtype][case.page_size, case.pages] = cell
    found = []
    by_size = sorted(shapes.items(), key=lambda one: (one[0][0], one[0][1], one[0][2].batch, one[0][2].kv_len))
    for (label, model, case, dtype), caches in by_size:
        for (size, pages), cell in sorted(caches.items(), key=lambda one: (one[0][0] or 0, one[0][1] or "")):
            row = {"backend": label, "model": model, "case": case.label(), "cache": dtype or "", "page": size}
            row |= {"pages": pages, "us": f"{cell.value:.4g}"}
            others = {"over contiguous": (None, None), "over linear": (size, "linear")}
            for name, key in others.items():
                made = None if key == (size, pages) or key not in caches else times(caches[key], cell, spreads)
                row[name] = made or ""
            if row["over contiguous"] or row["over linear"]:
                found.append(row)
    if not found:
        raise UserError("no backend has two caches of one shape: python -m attn_exp -m +experiment=serving has them")
    return found


def times(other: Cell, cell: Cell, spreads: Any) -> str | None:
    """Return how many times as long `cell` takes as `other`, with the interval."""
    made = ratio(other, cell, METRIC, spreads.between_rows(other.result, cell.result))
    return None if made is None else f"{made.value:.3f} [{made.low:.3f}, {made.high:.3f}]"


def main(folder: str) -> str:
    """Return the table of a sweep's folder, and the machine above it."""
    results = read_folder(Path(folder)).results
    made = rows(results)
    machines = ", ".join(sorted({one.device_name for one in results if one.device_name}))
    return f"{machines}: times over those of another cache of the same keys\n\n{grid(sheet_of(made))}"


if __name__ == "__main__":
    try:
        print(main(*sys.argv[1:2] or ["multirun/serving"]))
    except UserError as error:
        sys.exit(f"pages_cost.py: {error}")
