"""python bench/multi_gpu.py OUT_FOLDER: one sweep of 96 jobs on one GPU, then on all GPUs of the host at once.

Runs `python -m attn_exp -m ...` as processes of their own: on the first GPU alone, on all of them with
`hydra/launcher=local_gpus`, and on the second alone, since two GPUs of one host may differ by more than the measuring
does: a cell is compared with what the same GPU measured alone. Writes cells.csv and summary.json.

Wall time, start-up apart: from a GPU's first job to the sweep's end, the mean over GPUs. What a GPU idles at the end
counts.
"""

import csv
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

from attn_exp.core.host.nvml import visible_gpus
from attn_exp.core.record.record import Record
from attn_exp.results.calibration import margin_for
from attn_exp.results.read import read_folder

CHOICES = (
    *("model=sdpa_bench", "backend=flash,cudnn,efficient", "batch=2,4,8,16", "seq_len=512,1024,1536,2048"),
    *("causal=true,false", "save_plots=false"),
)
COMPARED = 2


def sweep(out: Path, name: str, *more: str, gpu: str | None = None) -> tuple[float, list[Record]]:
    """Run the sweep; its wall seconds with everything, and its records."""
    variables = dict(os.environ) | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
    began = time.perf_counter()
    command = [sys.executable, "-m", "attn_exp", "-m", *CHOICES, f"sweep={name}", *more]
    subprocess.run(command, cwd=out, env=variables, check=True)
    seconds = time.perf_counter() - began
    records = list(read_folder(out / "multirun" / name).records())
    assert records and {record.status for record in records} == {"ok"}, {record.status for record in records}
    return seconds, records


def gpu(record: Record) -> str:
    return str(record.environment["gpu_uuid"])


def wall_s(records: list[Record]) -> float:
    """Start-up apart, as the docstring of this file says."""
    first: dict[str, float] = {}
    for record in records:
        first[gpu(record)] = min(first.get(gpu(record), record.started_at), record.started_at)
    end = max(record.finished_at for record in records)
    return statistics.mean(end - start for start in first.values())


def medians(records: list[Record]) -> dict[tuple[str, str], float]:
    """Microseconds by job and pass."""
    return {
        (record.request.job, name): record.metrics[f"{name}/time_us"]
        for record in records
        for name in record.request.measuring.passes
    }


def differences(one: dict[tuple[str, str], float], other: dict[tuple[str, str], float]) -> dict[str, float]:
    """How far `other` is from `one`, relative to it, over the cells of both."""
    found = sorted(abs(other[cell] / us - 1) for cell, us in one.items() if cell in other)
    return {
        "cells": len(found),
        "median": round(statistics.median(found), 5),
        "p95": round(found[int(0.95 * (len(found) - 1))], 5),
        "largest": round(found[-1], 5),
    }


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    gpus = visible_gpus()
    assert len(gpus) > 1, "this host has less than two GPUs"
    alone: dict[str, dict[tuple[str, str], float]] = {}
    alone_s = {}
    whole_s, one = sweep(out, "one-0", gpu=gpus[0].uuid)
    alone[gpus[0].uuid], alone_s[gpus[0].uuid] = medians(one), wall_s(one)
    all_whole_s, every = sweep(out, "all", "hydra/launcher=local_gpus")
    for index, other in enumerate(gpus[1:COMPARED], 1):
        _, records = sweep(out, f"one-{index}", gpu=other.uuid)
        alone[other.uuid], alone_s[other.uuid] = medians(records), wall_s(records)

    together, by_case, rows = medians(every), defaultdict(set), []
    for record in every:
        by_case[record.request.case].add(gpu(record))
        for name in record.request.measuring.passes:
            cell, own = (record.request.job, name), alone.get(gpu(record))
            if own is not None:
                off = together[cell] / own[cell] - 1
                rows.append((record.request.label, name, gpu(record), own[cell], together[cell], off))
    margins = {uuid: margin_for(uuid) for uuid in alone}
    with (out / "cells.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("job", "pass", "gpu", "alone_us", "together_us", "difference", "within_margin"))
        for label, name, uuid, before, after, off in sorted(rows):
            within = "yes" if abs(off) <= margins[uuid] else "no"
            writer.writerow((label, name, uuid, f"{before:.3f}", f"{after:.3f}", f"{off:+.5f}", within))
    same = sorted(abs(row[-1]) for row in rows)
    first_s = alone_s[gpus[0].uuid]
    summary = {
        "command": "python bench/multi_gpu.py OUT_FOLDER",
        "sweep": shlex.join(["python", "-m", "attn_exp", "-m", *CHOICES, "hydra/launcher=local_gpus"]),
        "gpus": [f"{found.name} {found.uuid}" for found in gpus],
        "torch": every[0].environment.get("versions", {}).get("torch"),
        "jobs": len(every),
        "cells": len(together),
        "one_gpu_s": round(first_s, 2),
        "all_gpus_s": round(wall_s(every), 2),
        "times_as_fast": round(first_s / wall_s(every), 3),
        "of_the_number_of_gpus": round(first_s / wall_s(every) / len(gpus), 3),
        "one_gpu_with_start_up_s": round(whole_s, 2),
        "all_gpus_with_start_up_s": round(all_whole_s, 2),
        "jobs_by_gpu": {found.uuid: sum(gpu(record) == found.uuid for record in every) for found in gpus},
        "cases_on_more_than_one_gpu": sum(len(own) > 1 for own in by_case.values()),
        "margin": {uuid: round(margin, 4) for uuid, margin in margins.items()},
        "against_the_same_gpu_alone": {
            "cells": len(same),
            "within_margin": sum(abs(row[-1]) <= margins[row[2]] for row in rows),
            "median": round(statistics.median(same), 5),
            "p95": round(same[int(0.95 * (len(same) - 1))], 5),
            "largest": round(same[-1], 5),
        },
        "second_gpu_alone_against_the_first_alone": differences(*(alone[found.uuid] for found in gpus[:COMPARED])),
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
