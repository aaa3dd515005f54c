"""python bench/first_calls.py OUT_FOLDER [OVERRIDE ...]: what a backend's first call costs, compile caches on and off.

Each backend in a process of its own, on one shape: what is loaded, built, planned and compiled before its first result.
Twice with caches, of which the second time may find what the first has left, and once without (`caches=false`).
Writes first_calls.csv. One GPU, or a CPU with `backend=` and `device=cpu`.
"""

import subprocess
import sys
from pathlib import Path

from rows import write_rows
from tabulate import tabulate

from attn_exp.core.record.record import Record
from attn_exp.results.read import read_folder

BACKENDS = "math,efficient,flash,cudnn,cudnn_graph,flex,triton,xformers_cutlass,fa4,helion"
CHOICES = (
    *(f"backend={BACKENDS}", "model=sdpa_bench", "batch=4", "seq_len=2048", "causal=true"),
    *("isolation=fresh", "isolation.timeout_s=120", "tracker=none", "save_plots=false"),
)
ROUNDS = (("caches", "true"), ("caches_again", "true"), ("no_caches", "false"))


def first_calls(out: Path, name: str, caches: str, overrides: list[str]) -> dict[str, Record]:
    """The records of one round, by backend."""
    # What is typed wins over what stands above.
    typed = {word.partition("=")[0] for word in overrides}
    choices = [word for word in CHOICES if word.partition("=")[0] not in typed]
    command = [sys.executable, "-m", "attn_exp", "-m", *choices, *overrides, f"caches={caches}", f"sweep={name}"]
    subprocess.run(command, cwd=out, check=True)
    found = read_folder(out / "multirun" / name).records()
    return {record.request.label: record for record in found}


def main(out: Path, overrides: list[str]) -> None:
    """Run, tabulate, keep."""
    out.mkdir(parents=True, exist_ok=True)
    rounds = {name: first_calls(out, name, caches, overrides) for name, caches in ROUNDS}
    rows: list[dict[str, object]] = []
    for label, record in rounds[ROUNDS[0][0]].items():
        for direction in record.request.measuring.passes:
            row: dict[str, object] = {"backend": record.label, "pass": direction}
            for name, records in rounds.items():
                measured = records[label].passes.get(direction) if label in records else None
                seconds = measured.first_call_s if measured else None
                row[f"{name}_s"] = None if seconds is None else round(seconds, 3)
            row["status"] = record.status if record.status == "ok" else f"{record.status}: {record.reason}"
            rows.append(row)
    write_rows(out / "first_calls.csv", rows)
    print(tabulate(rows, headers="keys"))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
