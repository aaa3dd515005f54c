"""python bench/bookkeeping.py [JOBS]: what a job costs beside its measuring (Hydra, tracking, files), on the CPU.

Runs a sweep of JOBS (default 1000) jobs that compute next to nothing through the whole pipeline, MLflow on sqlite
included, in a temporary folder; then the same command again, which finds all of them done.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from attn_exp.record import Record
from attn_exp.store import read_sweep

HERE = Path(__file__).resolve().parent
EDGE = 100
TINY = (
    *("device=cpu", "seq_len=32", "model.q_heads=2", "model.kv_heads=2", "model.head_dim=16"),
    *("stopping.min_rounds=2", "stopping.max_rounds=2", "stopping.budget_s=0"),
    *("backend=eager", "backend._target_=idle.Idle", "backend.name=idle"),
)


def sweep(folder: Path, jobs: int) -> tuple[float, float, float]:
    """Run the sweep; when it began, its wall seconds, and the parent's peak memory in MB."""
    # A group, a plain key and a long range, as sweeps have them.
    axes = ("dtype=fp32,bf16", "causal=true,false", f"seed=range({max(1, jobs // 4)})")
    # One thread: two would wait for each other's turn wherever something else runs.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]), "OMP_NUM_THREADS": "1"}
    began, clock, peak_kb = time.time(), time.perf_counter(), 0
    with (folder / "out.txt").open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "attn_exp", "-m", *TINY, *axes, "sweep=bookkeeping"],
            cwd=folder,
            env=environment,
            stdout=out,
        )
        while process.poll() is None:
            peak_kb = max(peak_kb, _peak_kb(process.pid))
            time.sleep(0.05)
    if process.returncode:
        sys.exit(f"the sweep exited with code {process.returncode}: see {folder}")
    return began, time.perf_counter() - clock, peak_kb / 1024


def _peak_kb(pid: int) -> int:
    """The peak of a process' own memory; `wait4` would count its worker's too."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def beside_ms(records: list[Record]) -> tuple[float, float]:
    """Milliseconds a job from one job's start to the next one's, and the worker's own share of them."""
    a_job = (records[-1].started_at - records[0].started_at) / (len(records) - 1)
    own = sum(record.stages_s["total"] for record in records[:-1]) / (len(records) - 1)
    return a_job * 1e3, own * 1e3


def main(jobs: int) -> None:
    with tempfile.TemporaryDirectory(prefix="attn_exp_bench_") as name:
        folder = Path(name)
        began, wall_s, peak_mb = sweep(folder, jobs)
        results = folder / "multirun" / "bookkeeping"
        records = [record for record in read_sweep(results) if isinstance(record, Record)]
        records.sort(key=lambda record: record.started_at)
        wrong = {record.reason for record in records if record.status != "ok"}
        if wrong or len(records) < 2:
            sys.exit(f"{len(records)} jobs, and not all are ok: {wrong}")
        first = results / records[0].request.job
        handed, taken = (first / "request.yaml").stat().st_mtime, records[0].started_at
        print(f"{len(records)} jobs: {wall_s:.1f} s in all")
        print(f"first job handed over after {handed - began:.2f} s, taken by the worker {taken - handed:.2f} s later")
        for what, some in (("all", records), ("first", records[: EDGE + 1]), ("last", records[-EDGE - 1 :])):
            a_job, own = beside_ms(some)
            print(f"{what:<5} {len(some) - 1:>4}: {a_job:6.1f} ms a job, worker {own:5.1f}, beside {a_job - own:5.1f}")
        print(f"after the last job: {began + wall_s - records[-1].finished_at:.2f} s")
        print(f"parent's peak memory: {peak_mb:.0f} MB")
        began, wall_s, peak_mb = sweep(folder, jobs)
        print(f"again, all done: {wall_s:.2f} s, {wall_s / len(records) * 1e3:.1f} ms a skipped job, {peak_mb:.0f} MB")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
