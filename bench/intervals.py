"""python bench/intervals.py OUT_FOLDER [--count N]: what intervals over rounds cover, and what they cost.

Simulates rows, tables, sweeps and duels (tests/simulated.py) with Student's interval, as method 2 had it, and with
today's, and writes intervals.csv and intervals.txt. N rows, N/2 tables, and N/4 sweeps and duels for each figure.

With `--lowest N`, reads the folder's intervals.csv instead, draws N other duels for each condition in which today's
interval covered least, and writes lowest.csv: a share of N/4 duels scatters by more than it lies below its level.
"""

import argparse
import csv
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import simulated
from simulated import KINDS, student

from attn_exp.core.stats.interval import log_half_width

NOISES = (0.001, 0.003, 0.005, 0.01)
INTERVALS: dict[str, Callable[..., Any]] = {"before": student, "now": log_half_width}


def percent(values: list[bool]) -> float:
    return 100 * float(np.mean(values))


def rows(kind: str, interval: Callable[..., Any], count: int) -> dict[str, float]:
    found = {}
    for rounds in (5, 10, 20, 40, 80):
        covered, half = simulated.coverage(np.random.default_rng(rounds), kind, rounds, count, interval)
        found |= {f"covered {rounds}": 100 * covered, f"half {rounds}": half}
    return found


def tables(kind: str, interval: Callable[..., Any], count: int) -> dict[str, float]:
    found = {}
    for sd in NOISES:
        for rivals in (2, 9):
            for slower, word in ((0.0, "false"), (0.03, "found")):
                rng = np.random.default_rng(rivals)
                each = [simulated.table(rng, kind, 10, sd, rivals, interval, slower) for _ in range(count)]
                hits = [rivals - 1 in one if slower else bool(one) for one in each]
                found[f"{word} of {rivals}, {100 * sd:g} %"] = percent(hits)
    return found


def sweeps(kind: str, count: int, *, shared: bool) -> dict[str, float]:
    """Return what intervals of rows and of ratios cover where the rule of a sweep stops."""
    found = {}
    for sd in NOISES:
        rows, ratios, taken = simulated.swept(np.random.default_rng(14), kind, sd, count, shared=shared)
        name = f"{100 * sd:g} %"
        found |= {f"rows, {name}": 100 * rows, f"ratios, {name}": 100 * ratios, f"rounds, {name}": taken}
    return found


def duels(kind: str, interval: Callable[..., Any], count: int, *, shared: bool) -> dict[str, float]:
    found = {}
    for sd in NOISES:
        name, rng = f"{100 * sd:g} %", np.random.default_rng(11)
        missed, faster, slower, taken = simulated.duels(rng, kind, sd, count, shared=shared, interval=interval)
        found |= {
            f"covers, {name}": 100 - 100 * missed,
            f"told, {name}": 100 * (faster + slower),
            f"rounds, {name}": taken,
        }
        _, faster, slower, _ = simulated.duels(
            np.random.default_rng(12), kind, sd, count, shared=shared, effect=0.03, interval=interval
        )
        found[f"found, {name}"] = 100 * faster
    return found


# Duels whose interval covered less than this are drawn again.
_LOW = 94.0


def lowest(out: Path, count: int) -> None:
    """Draw duels again for the conditions of `out` whose coverage is low, with another seed."""
    with (out / "intervals.csv").open(newline="") as file:
        found = [row for row in csv.DictReader(file) if row["interval"] == "now" and ": covers, " in row["figure"]]
    rows = []
    for row in found:
        if float(row["value"]) >= _LOW:
            continue
        own, _, noise = row["figure"].partition(": covers, ")
        sd = float(noise.removesuffix(" %")) / 100
        rng = np.random.default_rng(13)
        missed, faster, slower, taken = simulated.duels(rng, row["rounds"], sd, count, shared=own == "shared")
        error = 100 * math.sqrt(missed * (1 - missed) / count)
        shares = (100 - 100 * missed, error, 100 * (faster + slower), taken)
        rows.append((row["rounds"], own, noise, count, *(f"{value:.4g}" for value in shares)))
        print(*rows[-1], flush=True)
    heads = ("rounds", "noise is", "noise", "duels", "covers", "standard error", "told", "taken")
    with (out / "lowest.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([heads, *rows])


# The columns of intervals.txt: their heads, and what is computed for each.
SHOWN = {
    "row: covers, 10": "row: covered 10",
    "80 rounds": "row: covered 80",
    "half-width, 10": "row: half 10",
    "20": "row: half 20",
    "80 rounds ": "row: half 80",
    "sweep: row covers": "sweep, own: rows, 1 %",
    "ratio": "sweep, own: ratios, 1 %",
    "2 rows: +3 % found": "table: found of 2, 0.3 %",
    "9 equal rows: told": "table: false of 9, 0.3 %",
    "duel: covers": "own: covers, 1 %",
    "told": "own: told, 1 %",
    "+3 % found, 0.3 %": "own: found, 0.3 %",
    "1 %": "own: found, 1 %",
}


def main(out: Path, count: int) -> None:
    lines, listed = [], []
    for kind in KINDS:
        for name, interval in INTERVALS.items():
            found: dict[str, float] = {}
            for part, values in (
                ("row", rows(kind, interval, count)),
                ("table", tables(kind, interval, count // 2)),
                ("own", duels(kind, interval, count // 4, shared=False)),
                ("shared", duels(kind, interval, count // 4, shared=True)),
                *(
                    (f"sweep, {own}", sweeps(kind, count // 4, shared=own == "shared") if name == "now" else {})
                    for own in ("own", "shared")
                ),
            ):
                found |= {f"{part}: {key}": value for key, value in values.items()}
            lines += [(kind, name, key, f"{value:.4g}") for key, value in found.items()]
            listed.append(
                [
                    kind,
                    name,
                    *(f"{found[key]:.{2 if 'half' in key else 1}f}" if key in found else "" for key in SHOWN.values()),
                ]
            )
    out.mkdir(parents=True, exist_ok=True)
    heads = [head.replace(": ", ":\n").replace(", ", ",\n").strip() for head in SHOWN]
    table = tabulate(listed, ["rounds are", "", *heads], disable_numparse=True, stralign="right")
    (out / "intervals.txt").write_text(f"{table}\n")
    with (out / "intervals.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([("rounds", "interval", "figure", "value"), *lines])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--lowest", type=int, metavar="N", help="draw N other duels where intervals covered least")
    options = parser.parse_args()
    if options.lowest:
        lowest(options.out, options.lowest)
    else:
        main(options.out, options.count)
