"""python bench/bookkeeping.py [JOBS] [--out FILE]: what a job costs beside its measuring (Hydra, tracking, files).

Runs a sweep of JOBS (default 1000) jobs that compute next to nothing through the whole pipeline on the CPU, MLflow on
sqlite included, in a temporary folder; then the same command again, which finds all of them done. Exit code 1 if the
second half of the jobs takes more memory, open files or processor time of parent or worker than the first half without
its first tenth, in which they still import. `make soak` runs 3000.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attn_exp.backends.eager import Eager
from attn_exp.core.host.process import descendants
from attn_exp.core.record.record import Record
from attn_exp.core.versions import __version__
from attn_exp.results.read import read_folder

HERE = Path(__file__).resolve().parent
PARTS = 10
TINY = (
    *("device=cpu", "seq_len=32", "model.q_heads=2", "model.kv_heads=2", "model.head_dim=16"),
    *("stopping.min_rounds=2", "stopping.max_rounds=2", "stopping.budget_s=0", "passes=[forward]", "save_plots=false"),
    *("backend=eager", "backend._target_=bookkeeping.Idle", "backend.name=idle"),
)
_EVERY_S = 0.3
# More than that is not flat. Other programs move the processor time of a tenth by 30 %, of half the jobs by 15 %.
_MORE_MB, _MORE_FILES, _MORE_TIME = 16.0, 1, 1.3
_FEWEST = 500


class Idle(Eager):
    """The plain formula, right, without a claim; the case is what makes it nothing."""

    def claimed_kernels(self, direction: str, device: str) -> str | None:
        return None


@dataclass(frozen=True)
class Sample:
    """A process at one moment: seconds since 1970, processor seconds so far, resident MB, open files."""

    at: float
    cpu_s: float
    mb: float
    files: int


@dataclass(frozen=True)
class Used:
    """What a process used between two moments: milliseconds of processor a job, resident MB, most open files."""

    cpu_ms: float
    mb: float
    files: int

    @staticmethod
    def between(samples: Sequence[Sample], first: float, last: float, jobs: int) -> "Used | None":
        """Return what a process used between two moments in which it did so many jobs; None if it was not looked at."""
        there = [one for one in samples if first <= one.at <= last]
        if len(there) < 2:
            return None
        share = (there[-1].at - there[0].at) / (last - first)
        cpu_ms = (there[-1].cpu_s - there[0].cpu_s) / share / jobs * 1e3
        return Used(cpu_ms, statistics.median(one.mb for one in there), max(one.files for one in there))

    def __str__(self) -> str:
        return f"{self.cpu_ms:5.1f} ms of processor, {self.mb:5.0f} MB, {self.files:2d} files"


@dataclass(frozen=True)
class Parent:
    """One run of the command: when it began, how long it took, and what parent and worker used, by name."""

    began: float
    wall_s: float
    peak_mb: float
    samples: dict[str, list[Sample]]


def sweep(folder: Path, jobs: int) -> Parent:
    """Run the sweep to its end."""
    # A group, a plain key and a long range, as sweeps have them.
    axes = ("dtype=fp32,bf16", "causal=true,false", f"seed=range({max(1, jobs // 4)})")
    # One thread: two would wait for each other's turn wherever something else runs.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]), "OMP_NUM_THREADS": "1"}
    began, clock, peak_mb = time.time(), time.perf_counter(), 0.0
    samples: dict[str, list[Sample]] = {"parent": [], "worker": []}
    with (folder / "out.txt").open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "attn_exp", "-m", *TINY, *axes, "sweep=bookkeeping"],
            cwd=folder,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        while process.poll() is None:
            for name, pid in (("parent", process.pid), ("worker", _worker(process.pid))):
                if pid is not None and (seen := _look(pid)) is not None:
                    samples[name].append(seen)
            peak_mb = max(peak_mb, _peak_mb(process.pid))
            time.sleep(_EVERY_S)
    if process.returncode:
        sys.exit(f"the sweep exited with code {process.returncode}: {(folder / 'out.txt').read_text()[-2000:]}")
    return Parent(began, time.perf_counter() - clock, peak_mb, samples)


def _worker(parent: int) -> int | None:
    """Return the worker of a process: its own guard, between the two, has no `--parent` among its arguments."""
    for child, _ in descendants(parent):
        words = _bytes(Path(f"/proc/{child}/cmdline")).split(b"\0")
        if b"attn_exp.worker" in words and b"--parent" in words:
            return child
    return None


def _look(pid: int) -> Sample | None:
    """Return what a process has used so far; `wait4` would count its children's. None if it has ended."""
    try:
        times = _bytes(Path(f"/proc/{pid}/stat")).decode().rsplit(")", 1)[1].split()[11:13]
        pages = int(_words(Path(f"/proc/{pid}/statm"))[1])
        files = len(os.listdir(f"/proc/{pid}/fd"))
    except (OSError, IndexError):
        return None
    cpu_s = sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
    return Sample(time.time(), cpu_s, pages * os.sysconf("SC_PAGE_SIZE") / 2**20, files)


def _peak_mb(pid: int) -> float:
    """Return the largest resident memory of a process so far; `statm` shows the present one alone."""
    lines = _bytes(Path(f"/proc/{pid}/status")).decode().splitlines()
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), 0.0)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _words(path: Path) -> list[str]:
    return _bytes(path).decode().split()


def beside_ms(records: list[Record]) -> tuple[float, float]:
    """Milliseconds a job from one job's start to the next one's, and the worker's own share of them."""
    a_job = (records[-1].started_at - records[0].started_at) / (len(records) - 1)
    own = sum(record.stages_s["total"] for record in records[:-1]) / (len(records) - 1)
    return a_job * 1e3, own * 1e3


def grown(parts: Sequence[Used | None]) -> list[str]:
    """Return what is larger in the second half of the tenths of a sweep than noise makes it, in words."""
    known = [one for one in parts if one is not None]
    if len(known) < len(parts):
        return ["was not looked at"]
    early, late = _typical(known[1 : PARTS // 2]), _typical(known[PARTS // 2 :])
    more = [f"{late.mb - early.mb:.0f} MB"] if late.mb > early.mb + _MORE_MB else []
    more += [f"{late.files - early.files} open files"] if late.files > early.files + _MORE_FILES else []
    longer = late.cpu_ms > early.cpu_ms * _MORE_TIME
    return more + ([f"{late.cpu_ms - early.cpu_ms:.1f} ms of processor a job"] if longer else [])


def _typical(parts: Sequence[Used]) -> Used:
    return Used(
        statistics.median(one.cpu_ms for one in parts),
        statistics.median(one.mb for one in parts),
        statistics.median_low(one.files for one in parts),
    )


def main(jobs: int, out: Path | None) -> int:
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

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
        say(
            f"attn_exp {__version__}, {count} jobs: {parent.wall_s:.1f} s in all; load average {os.getloadavg()[0]:.1f}"
        )
        # Taken at once: the worker waited for the job. Later: the job waited for the worker.
        say(f"first job handed over after {handed - parent.began:.2f} s, taken {taken - handed:.2f} s later")
        edges = [count * part // PARTS for part in range(PARTS + 1)]
        used: dict[str, list[Used | None]] = {"parent": [], "worker": []}
        for first_job, last_job in [(0, count), *itertools.pairwise(edges)]:
            some = records[first_job : last_job + 1]
            a_job, own = beside_ms(some)
            span = some[0].started_at, some[-1].started_at, len(some) - 1
            for who, samples in parent.samples.items():
                used[who].append(Used.between(samples, *span))
            say(
                f"jobs {first_job:>5} to {last_job:>5}: {a_job:6.1f} ms a job, worker {own:5.1f}, "
                f"beside {a_job - own:5.1f}; " + "; ".join(f"{who} {parts[-1]}" for who, parts in used.items())
            )
        say(f"after the last job: {parent.began + parent.wall_s - records[-1].finished_at:.2f} s")
        say(f"parent: {parent.peak_mb:.0f} MB at its peak")
        again = sweep(folder, jobs)
        say(
            f"again, all done: {again.wall_s:.2f} s, {again.wall_s / count * 1e3:.1f} ms a skipped job, "
            f"{again.samples['parent'][-1].cpu_s:.2f} s of processor, {again.peak_mb:.0f} MB"
        )
    more: list[str] = []
    if count >= _FEWEST:
        more = [f"{who} {what}" for who, parts in used.items() for what in grown(parts[1:])]
        say("the second half is like the first" if not more else f"the second half takes more: {', '.join(more)}")
    if out is not None:
        out.write_text("\n".join(lines) + "\n")
    return 1 if more else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python bench/bookkeeping.py", description=__doc__)
    parser.add_argument("jobs", nargs="?", type=int, default=1000)
    parser.add_argument("--out", type=Path, help="keep what is printed in this file, too")
    given = parser.parse_args()
    sys.exit(main(given.jobs, given.out))
