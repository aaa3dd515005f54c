"""python bench/kept_table.py TABLE.csv FOLDER: the records that a kept table.csv tells of, for what reads records.

`attn-exp compare` and `attn-exp log` read the folder as a sweep's. What a table lacks is not made up: samples, so that
there is no plot of them, the times of single kernels, the configuration, most of the environment. Ceilings follow from
the shares of them. `unstable` is judged by today's limit: older tables were marked by others.
"""

import ast
import csv
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from attn_exp.core.case.case import HALVES, Case
from attn_exp.core.conf import conf_folder, read_yaml
from attn_exp.core.record.file import write_record
from attn_exp.core.record.flags import STABLE
from attn_exp.core.record.record import Kernel, PassRecord, Record
from attn_exp.core.record.request import Compile, Measuring, Request

ENVIRONMENT = ("gpu", "gpu_uuid", "cuda", "cudnn", "driver")


def keep(
    table: Path, folder: Path, chosen: Callable[[Mapping[str, str]], bool] = lambda row: True, command: str = ""
) -> Path:
    """Write the records of a table's chosen rows, and the command that measured them; return their folder.

    What older tables have no columns of is as the commands in results/h200/README.md set it.
    """
    with table.open(newline="") as lines:
        rows = [{"regime": "sustained", "l2": "cold", "inputs": "normal", **row} for row in csv.DictReader(lines)]
    # A row without a result does not say which passes were asked for: those of the others.
    asked = tuple(side for side in HALVES if any(row.get(f"{side}/time_us") for row in rows))
    for row in filter(chosen, rows):
        own = folder / row["job"]
        own.mkdir(parents=True)
        write_record(record_of(row, folder.name, asked), own)
    if command:
        (folder / "command.txt").write_text(f"{command}\n")
    return folder


def record_of(row: Mapping[str, str], sweep: str, asked: Sequence[str] = HALVES) -> Record:
    sides = [side for side in HALVES if row.get(f"{side}/time_us")]
    metrics = {
        name: float(value)
        for name, value in row.items()
        if name.split("/")[0] in sides and value and not name.endswith("/kernels")
    }
    for side in sides:
        low, high, middle = (metrics[f"{side}/time{part}_us"] for part in ("_low", "_high", ""))
        metrics.setdefault(f"{side}/time_half_width", (high - low) / 2 / middle)
    wide = {side: ("unstable",) if metrics[f"{side}/time_half_width"] > STABLE else () for side in sides}
    flags = {*row["flags"].split()} - {"unstable"} | {flag for one in wide.values() for flag in one}
    finished = float(row["finished_at"])
    return Record(
        request=request_of(row, sweep, sides or asked),
        status=row["status"],  # type: ignore[arg-type]
        reason=row["reason"] or None,
        metrics=metrics,
        flags=tuple(sorted(flags)),
        passes={side: PassRecord(kernels=kernels_of(row[f"{side}/kernels"]), flags=wide[side]) for side in sides},
        environment={name: row[name] for name in ENVIRONMENT if row[name]} | {"versions": {"torch": row["torch"]}},
        ceilings=ceilings_of(metrics),
        started_at=finished,
        finished_at=finished,
    )


def request_of(row: Mapping[str, str], sweep: str, sides: Sequence[str]) -> Request:
    case = Case(**{one.name: value_of(row[one.name]) for one in fields(Case) if row.get(one.name)})
    backend = read_yaml(conf_folder() / "backend" / f"{row['backend']}.yaml")
    measuring = Measuring(
        timer=row["timer"],
        also=(),
        precision=STABLE,
        min_rounds=0,
        max_rounds=0,
        budget_s=0.0,
        regime=row["regime"],  # type: ignore[arg-type]
        passes=tuple(sides),
        seed=int(row["seed"]),
        l2=row["l2"],
        inputs=row["inputs"],
    )
    return Request(
        job=row["job"],
        sweep=sweep,
        model=row["model"],
        device=row["device"],
        case=case,
        backend={name: value for name, value in backend.items() if name != "about"},
        measuring=measuring,
        compile=Compile(mode=row["compile"]),
    )


def value_of(text: str) -> Any:
    """The value of a cell: a number, a truth value or lengths; a word is itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def kernels_of(text: str) -> tuple[Kernel, ...]:
    return tuple(Kernel(name=name.strip(), count=1.0, time_us=0.0) for name in text.split(" | ") if name.strip())


def ceilings_of(metrics: Mapping[str, float]) -> dict[str, float]:
    found = {}
    for name, unit, rate, share in (
        ("matmul_flops_per_s", 1e12, "tflops", "flops_of_measured"),
        ("copy_bytes_per_s", 1e9, "gb_per_s", "bandwidth_of_measured"),
    ):
        if metrics.get(f"forward/{share}"):
            found[name] = unit * metrics[f"forward/{rate}"] / metrics[f"forward/{share}"]
    return found


if __name__ == "__main__":
    print(f"the records are in {keep(Path(sys.argv[1]), Path(sys.argv[2]))}")
