"""python bench/profilers.py OUT_FOLDER: do Proton, PyTorch's profiler and Nsight Compute tell the same duration?

Runs two backends on FLUX's shape under all three, and writes agreement.csv: the longest kernel of each pass by each of
them in microseconds, its ratio to PyTorch's, and the SM clocks beside them. Also keeps the explain page and
tables of each job. One GPU, about a minute.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from rows import write_rows
from tabulate import tabulate

from attn_exp.core.record.profile import Profile
from attn_exp.core.record.record import Record
from attn_exp.results.read import read_folder

CHOICES = ("model=flux", "dtype=bf16", "causal=false", "backend=cudnn,triton", "regime=burst")
PROFILERS = ("torch", "proton", "ncu")
KEPT = ("explain.txt", "kernels.csv", "lines.csv")


def longest_us(profile: Profile | None, direction: str) -> float | None:
    """The time of the longest kernel of a pass, in one call."""
    if profile is None or profile.status != "ok":
        return None
    times = [one.time_us / (one.count or 1) for one in profile.kernels if one.direction == direction and one.time_us]
    return max(times, default=None)


def row(record: Record, direction: str) -> dict[str, object]:
    """One pass of one job: each profiler's duration and its ratio to PyTorch's."""
    times = {name: longest_us(record.profiles.get(name), direction) for name in PROFILERS}
    found: dict[str, object] = {"backend": record.label, "pass": direction}
    found |= {f"{name}_us": time and round(time, 1) for name, time in times.items()}
    base = times["torch"]
    found |= {f"{name}_over_torch": round(time / base, 4) if base and time else None for name, time in times.items()}
    profile = record.profiles.get("ncu")
    found["ncu_sm_clock_mhz"] = profile.metrics.get(f"{direction}/sm_clock_mhz") if profile else None
    found["timed_sm_clock_mhz"] = record.telemetry[-1].get("sm_clock_mhz") if record.telemetry else None
    return found


def main(out: Path) -> None:
    """Run, compare, keep."""
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "attn_exp", "-m", *CHOICES, f"profiler=[{','.join(PROFILERS)}]", "sweep=profilers"]
    subprocess.run([*command, "tracker=none"], cwd=out, check=True)
    records = list(read_folder(out / "multirun" / "profilers").records())
    rows = [row(record, direction) for record in records for direction in record.passes]
    write_rows(out / "agreement.csv", rows)
    for record in records:
        profiles = out / "multirun" / "profilers" / record.request.job / "profiles"
        for path in sorted(path for name in KEPT for path in profiles.rglob(name)):
            who = "" if path.parent == profiles else f"{path.parent.name}-"
            shutil.copy(path, out / f"{record.label}-{who}{path.name}")
        for name, profile in record.profiles.items():
            print(f"{record.label} {name}: {profile.status} {profile.reason or ''} {profile.seconds:.1f} s")
    print(tabulate(rows, headers="keys"))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
