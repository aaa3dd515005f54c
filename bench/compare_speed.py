"""python bench/compare_speed.py [RECORDS ...]: how long `attn-exp compare` takes, from folders and sqlite.

For each number of records (default 100, 1000, 10000; 100000 takes some minutes and 2 GB of disk) two sweeps of half as
many jobs are made, each with as much as a real one on a GPU (450 samples, 56 metrics), and compared in a process of
its own: wall time, processor time, and memory at its peak. The sqlite database has MLflow's tables, filled directly:
storing 10,000 runs through MLflow takes minutes and is not what is asked here.
"""

import json
import os
import random
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# What a record of a GPU has beside the times.
OTHERS = (
    *("tflops", "tflops_sdpa_convention", "gb_per_s", "min_bytes", "flops_of_measured", "flops_of_peak"),
    *("bandwidth_of_measured", "bandwidth_of_peak", "peak_memory_bytes", "first_call_s", "relative_spread", "samples"),
    *("rounds", "outliers", "kernel_time_us", "event_time_us", "error_out", "error_out_worst_row", "error_out_max_abs"),
)
SAMPLES = {"forward": 245, "backward": 126}
CASES = [
    (batch, length, causal) for length in (1024, 2048, 4096, 8192) for batch in (1, 8, 16) for causal in (True, False)
]


def record(sweep: str, number: int, draw: random.Random) -> dict[str, Any]:
    """One job's record as the worker writes it; `number` makes case and backend."""
    batch, length, causal = CASES[number % len(CASES)]
    seed = number // len(CASES)
    backend = ("flash", "cudnn", "efficient", "math", "eager")[seed % 5]
    # Beyond the product of the choices lengths go up by one: no two jobs are of one case and backend.
    length += seed // 5
    case = {
        "batch": batch, "q_heads": 16, "kv_heads": 16, "q_len": length, "kv_len": length, "head_dim": 128,
        "value_dim": 128, "dtype": "bfloat16", "causal": causal, "align": "bottom_right", "window": None,
    }  # fmt: skip
    metrics, passes = {}, {}
    for name, count in SAMPLES.items():
        us = 50.0 * batch * (1 + seed % 5) * draw.uniform(0.99, 1.01)
        names = ("mean", "min", "p5", "p20", "p80", "p95")
        metrics |= {f"{name}/time_{word}_us": us for word in names}
        metrics |= {f"{name}/time_us": us, f"{name}/time_low_us": us * 0.997, f"{name}/time_high_us": us * 1.003}
        metrics |= {
            f"{name}/{word}": draw.random() for word in ("tflops", "gb_per_s", "flops_of_measured", "error_out")
        }
        metrics |= {f"{name}/first_call_s": draw.random(), f"{name}/min_bytes": 1e7 * batch}
        timings = [timing(us, many, timer, draw) for timer, many in (("device", count), ("kernel", 20), ("event", 20))]
        kernels = [{"name": f"{backend}_{name}_kernel", "count": 1.0, "time_us": us}]
        passes[name] = {"first_call_s": 0.1, "peak_memory_bytes": 1 << 30, "errors": {}, "kernels": kernels,
                        "timings": timings}  # fmt: skip
    return {
        "request": {
            "job": f"{backend}-{number:010d}", "sweep": sweep, "model": "sdpa_bench", "device": "cuda", "case": case,
            "backend": {"_target_": "attn_exp.backends.sdpa.Flash", "name": backend},
            "measuring": {"timer": "device", "also": ["kernel", "event"], "precision": 0.005, "min_rounds": 7,
                          "max_rounds": 40, "budget_s": 0.1, "regime": "burst",
                          "passes": ["forward", "backward"], "seed": 123, "l2": "cold"},
            "gpu_uuid": "GPU-1", "label": "", "config": {"model": {"name": "sdpa_bench"}},
        },
        "status": "ok", "reason": None, "passes": passes, "metrics": metrics, "flags": ["drift"],
        "environment": {"gpu": "NVIDIA H200", "gpu_uuid": "GPU-1", "power_limit_w": 700.0, "driver": "580",
                        "versions": {"torch": "2.11"}, "inputs": "normal(0, 1)"},
        "ceilings": {"copy_bytes_per_s": 4.2e12, "matmul_flops_per_s": 7.2e14},
        "telemetry": [], "stages_s": {"total": 0.5}, "started_at": 1e9, "finished_at": 1e9 + number, "schema": 1,
        "method_version": "2",
    }  # fmt: skip


def timing(us: float, count: int, timer: str, draw: random.Random) -> dict[str, Any]:
    times = [round(us * draw.uniform(0.99, 1.01), 3) for _ in range(count)]
    return {"timer": timer, "l2": "cold", "times_us": times, "rounds": [i // 20 for i in range(count)],
            "stop_reason": "precise", "notes": {"calls_per_round": 20.0}, "flags": []}  # fmt: skip


def fill(folder: Path, records: int) -> float:
    """Two sweeps of half as many jobs each, in folders and in a database; bytes of one record."""
    database = sqlite3.connect(folder / "mlflow.db")
    database.executescript(
        """CREATE TABLE experiments (experiment_id INTEGER PRIMARY KEY, name TEXT);
        CREATE TABLE runs (run_uuid TEXT PRIMARY KEY, experiment_id INTEGER, artifact_uri TEXT, lifecycle_stage TEXT,
                           start_time INTEGER);
        CREATE TABLE tags (key TEXT, value TEXT, run_uuid TEXT, PRIMARY KEY (key, run_uuid));
        CREATE INDEX index_tags_run_uuid ON tags (run_uuid);
        INSERT INTO experiments VALUES (1, 'attn_exp');"""
    )
    size = 0
    for sweep in ("old", "new"):
        draw = random.Random(sweep)
        for number in range(records // 2):
            content = record(sweep, number, draw)
            job = folder / sweep / content["request"]["job"]
            job.mkdir(parents=True)
            text = json.dumps(content, indent=1)
            (job / "record.json").write_text(text)
            run, size = f"{sweep}{number}", len(text)
            database.execute("INSERT INTO runs VALUES (?, 1, ?, 'active', ?)", (run, str(job), number))
            tags = [("kind", "job"), ("sweep", sweep), ("job", job.name), ("status", "ok"), ("gpu", "NVIDIA H200")]
            database.executemany("INSERT INTO tags VALUES (?, ?, ?)", [(f"attn_exp.{k}", v, run) for k, v in tags])
    database.commit()
    database.close()
    return size


def timed(folder: Path, *arguments: str) -> tuple[float, float, float]:
    """Wall seconds, processor seconds and peak MB of one comparison in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(HERE.parent)}
    command = [sys.executable, "-m", "attn_exp", "compare", "new", *arguments]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with (folder / "out.txt").open("w") as out:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out)
        peak_kb = 0
        while process.poll() is None:
            peak_kb = max(peak_kb, peak_memory_kb(process.pid))
            time.sleep(0.01)
    wall_s = time.perf_counter() - began
    if process.returncode:
        sys.exit(f"{' '.join(command)} exited with code {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, peak_kb / 1024


def peak_memory_kb(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def main(counts: list[int]) -> None:
    print(f"{'records':>8}  {'what':<34} {'wall s':>7} {'cpu s':>7} {'peak MB':>8}")
    for count in counts:
        with tempfile.TemporaryDirectory(prefix="attn_exp_bench_") as name:
            folder = Path(name)
            size = fill(folder, count)
            store = ("uri=sqlite:///mlflow.db",)
            ways = {
                "against, folders, table": ("against=old", "folder=."),
                "against, sqlite, table": ("against=old", *store),
                "against, folders, json": ("against=old", "folder=.", "format=json"),
                "against, folders, html report": ("against=old", "folder=.", "out=report.html"),
                "html report of one sweep (half)": ("baseline=flash", "folder=.", "out=report.html"),
                "rivals of one sweep (half), table": ("baseline=flash", "folder=."),
                "against, where=causal, 20 rows": ("against=old", "folder=.", "where=causal", "rows=20"),
            }
            for what, arguments in ways.items():
                wall_s, cpu_s, peak_mb = min(timed(folder, *arguments) for _ in range(3 if count < 50_000 else 1))
                print(f"{count:>8}  {what:<34} {wall_s:>7.2f} {cpu_s:>7.2f} {peak_mb:>8.0f}", flush=True)
            print(f"{'':>8}  ({size / 1024:.0f} KB a record, load average {os.getloadavg()[0]:.1f})", flush=True)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [100, 1000, 10_000])
