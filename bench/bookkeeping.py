"""python bench/bookkeeping.py [JOBS]: what a job costs beside its measuring (Hydra, tracking, files), on the CPU.

Runs a sweep of JOBS (default 1000) jobs that compute next to nothing through the whole pipeline, MLflow on sqlite
included, in a temporary folder; then the same command again, which finds all of them done.
"""

import itertools
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from attn_exp.core.record import Record
from attn_exp.results.read import read_folder

HERE = Path(__file__).resolve().parent
PARTS = 10
TINY = (
    *("device=cpu", "seq_len=32", "model.q_heads=2", "model.kv_heads=2", "model.head_dim=16"),
    *("stopping.min_rounds=2", "stopping.max_rounds=2", "stopping.budget_s=0", "passes=[forward]", "save_plots=false"),
    *("backend=eager", "backend._target_=idle.Idle", "backend.name=idle"),
)


@dataclass(frozen=True)
class Parent:
    """One run of the command: when it began, how long it took, and what its own process used."""

    began: float
    wall_s: float
    cpu_s: float
    peak_mb: float
    # (seconds since 1970, resident MB), a point a second
    memory: tuple[tuple[float, float], ...] = ()

    def resident_mb(self, first: float, last: float) -> float:
        """The largest resident memory between two moments."""
        return max((mb for at, mb in self.memory if first <= at <= last), default=0.0)


def sweep(folder: Path, jobs: int) -> Parent:
    """Run the sweep to its end."""
    # A group, a plain key and a long range, as sweeps have them.
    axes = ("dtype=fp32,bf16", "causal=true,false", f"seed=range({max(1, jobs // 4)})")
    # One thread: two would wait for each other's turn wherever something else runs.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]), "OMP_NUM_THREADS": "1"}
    began, clock, used = time.time(), time.perf_counter(), (0.0, 0.0)
    memory: list[tuple[float, float]] = []
    with (folder / "out.txt").open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "attn_exp", "-m", *TINY, *axes, "sweep=bookkeeping"],
            cwd=folder,
            env=environment,
            stdout=out,
        )
        while process.poll() is None:
            cpu_s, peak_mb, resident_mb = _used(process.pid)
            used = max(used[0], cpu_s), max(used[1], peak_mb)
            memory.append((time.time(), resident_mb))
            time.sleep(0.3)
    if process.returncode:
        sys.exit(f"the sweep exited with code {process.returncode}: {(folder / 'out.txt').read_text()[-2000:]}")
    return Parent(began, time.perf_counter() - clock, *used, tuple(memory))


def _used(pid: int) -> tuple[float, float, float]:
    """Processor seconds of one process so far, its peak and present memory in MB; `wait4` would count its worker's."""
    try:
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        times = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    except OSError:
        return 0.0, 0.0, 0.0
    peak_kb, resident_kb = (
        next((int(line.split()[1]) for line in status if line.startswith(key)), 0) for key in ("VmHWM:", "VmRSS:")
    )
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK"), peak_kb / 1024, resident_kb / 1024


def beside_ms(records: list[Record]) -> tuple[float, float]:
    """Milliseconds a job from one job's start to the next one's, and the worker's own share of them."""
    a_job = (records[-1].started_at - records[0].started_at) / (len(records) - 1)
    own = sum(record.stages_s["total"] for record in records[:-1]) / (len(records) - 1)
    return a_job * 1e3, own * 1e3


def main(jobs: int) -> None:
    with tempfile.TemporaryDirectory(prefix="attn_exp_bench_") as name:
        folder = Path(name)
        parent = sweep(folder, jobs)
        results = folder / "multirun" / "bookkeeping"
        records = list(read_folder(results).records())
        records.sort(key=lambda record: record.started_at)
        wrong = {record.reason for record in records if record.status != "ok"}
        if wrong or len(records) < 2:
            sys.exit(f"{len(records)} jobs, and not all are ok: {wrong}")
        count = len(records)
        first = results / records[0].request.job
        handed, taken = (first / "request.yaml").stat().st_mtime, records[0].started_at
        print(f"{count} jobs: {parent.wall_s:.1f} s in all; load average {os.getloadavg()[0]:.1f}")
        # Taken at once: the worker waited for the job. Later: the job waited for the worker.
        print(f"first job handed over after {handed - parent.began:.2f} s, taken {taken - handed:.2f} s later")
        edges = [count * part // PARTS for part in range(PARTS + 1)]
        for first_job, last_job in [(0, count), *itertools.pairwise(edges)]:
            some = records[first_job : last_job + 1]
            a_job, own = beside_ms(some)
            mb = parent.resident_mb(some[0].started_at, some[-1].started_at)
            print(
                f"jobs {first_job:>5} to {last_job:>5}: {a_job:6.1f} ms a job, "
                f"worker {own:5.1f}, beside {a_job - own:5.1f}; parent {mb:.0f} MB"
            )
        print(f"after the last job: {parent.began + parent.wall_s - records[-1].finished_at:.2f} s")
        print(f"parent: {parent.cpu_s / count * 1e3:.1f} ms of processor a job, {parent.peak_mb:.0f} MB at its peak")
        again = sweep(folder, jobs)
        print(
            f"again, all done: {again.wall_s:.2f} s, {again.wall_s / count * 1e3:.1f} ms a skipped job, "
            f"{again.cpu_s:.2f} s of processor, {again.peak_mb:.0f} MB"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
