"""python bench/sdpa_sweep.py OUT_FOLDER: attn_exp against a plain loop over S1's 30 configurations, one GPU, one call.

Runs bench/plain_loop.py and `python -m attn_exp -m +experiment=sdpa_sweep` as processes of their own, start-up
included, and compares wall time and the kernel times. Writes plain.csv, table.csv, agreement.csv and summary.json.
"""

import csv
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from attn_exp.record import Record
from attn_exp.stats import summarize
from attn_exp.store import read_sweep

HERE = Path(__file__).resolve().parent
SMALL_US = 50.0


def timed(command: list[str], cwd: Path) -> float:
    """Wall seconds of a command that must succeed."""
    began = time.perf_counter()
    subprocess.run(command, cwd=cwd, check=True)
    return time.perf_counter() - began


def agreement(plain: Path, records: list[Record]) -> list[dict[str, object]]:
    """One row a cell: the plain loop's kernel time, attn_exp's by `kernel` and by `device`, and their ratio."""
    measured = {
        (record.request.case.batch, record.request.case.q_len, record.request.case.causal): record for record in records
    }
    rows = []
    with plain.open() as file:
        for row in csv.DictReader(file):
            record = measured[int(row["batch"]), int(row["seq_len"]), row["causal"] == "True"]
            for direction in ("forward", "backward"):
                theirs = float(row[f"{direction}_us"])
                timings = {timing.timer: timing for timing in record.passes[direction].timings}
                kernel_us = summarize(timings["kernel"].times_us, timings["kernel"].rounds).median_us
                rows.append(
                    {
                        "batch": row["batch"],
                        "seq_len": row["seq_len"],
                        "causal": row["causal"],
                        "pass": direction,
                        "plain_kernel_us": theirs,
                        "kernel_us": round(kernel_us, 3),
                        "device_us": round(record.metrics[f"{direction}/time_us"], 3),
                        "half_width": round(record.metrics[f"{direction}/time_half_width"], 5),
                        "kernel_over_plain": round(kernel_us / theirs, 4),
                        "flags": " ".join(record.flags),
                    }
                )
    return rows


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    plain_s = timed([sys.executable, str(HERE / "plain_loop.py"), str(out / "plain.csv")], out)
    started = time.time()
    ours_s = timed([sys.executable, "-m", "attn_exp", "-m", "+experiment=sdpa_sweep", "sweep=sdpa"], out)
    folder = out / "multirun" / "sdpa"
    records = [record for record in read_sweep(folder) if isinstance(record, Record)]
    (out / "table.csv").write_bytes((folder / "table.csv").read_bytes())
    rows = agreement(out / "plain.csv", records)
    with (out / "agreement.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    large = [row for row in rows if float(str(row["plain_kernel_us"])) > SMALL_US]
    off = [abs(float(str(row["kernel_over_plain"])) - 1) for row in large]
    stages = {stage for record in records for stage in record.stages_s}
    began = min(record.started_at for record in records)
    ended = max(record.finished_at for record in records)
    summary = {
        "gpu": records[0].environment.get("gpu"),
        "torch": records[0].environment["versions"]["torch"],
        "plain_loop_s": round(plain_s, 2),
        "attn_exp_s": round(ours_s, 2),
        "ratio": round(ours_s / plain_s, 3),
        "start_up_s": round(began - started, 2),
        "first_job_to_last_s": round(ended - began, 2),
        "end_s": round(started + ours_s - ended, 2),
        "stages_s": {
            stage: round(sum(record.stages_s.get(stage, 0.0) for record in records), 3) for stage in sorted(stages)
        },
        "cells_above_50_us": len(large),
        "within_3_percent": sum(value <= 0.03 for value in off),
        "largest_disagreement": round(max(off), 4),
        "median_disagreement": round(statistics.median(off), 4),
        "ok": sum(record.status == "ok" for record in records),
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
