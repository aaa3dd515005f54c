"""python bench/same_kernel.py OUT_FOLDER [SWEEP_FOLDER ...]: how far names of one kernel differ

`cudnn`, `aten_cudnn` and `cudnn_graph` run one cuDNN kernel, so each pair of their rows is an A/A test. Without sweeps
it runs, on one GPU: the shapes of `+experiment=table` in bursts, under load, and in bursts again, each in one command.
Of each pair it computes the ratio, and whether its interval (paired, with the floor that comparisons have) contains 1.
Writes same_kernel.csv and same_kernel.txt, and keeps the sweeps' folders in OUT_FOLDER/multirun. With --cpu it measures
flash twice in turns on this CPU beside a program that computes all the time, ten times, and writes cpu.txt.
"""

import argparse
import itertools
import math
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from rows import write_rows

from attn_exp.comparison.ratio import TURNS_FLOOR
from attn_exp.core.record.record import Record
from attn_exp.core.stats.paired import paired_by_round
from attn_exp.core.stats.summary import medians_by_round
from attn_exp.results.read import read_folder

NAMES = ("cudnn", "aten_cudnn", "cudnn_graph")
STEPS = (("burst", "burst"), ("sustained", "sustained"), ("burst_again", "burst"))


def run(out: Path, name: str, regime: str) -> None:
    """Run the sweep of one step."""
    began = time.perf_counter()
    command = [
        *(sys.executable, "-m", "attn_exp", "-m", "+experiment=table", f"backend={','.join(NAMES)}"),
        *(f"regime={regime}", f"sweep={name}", "tracker=none", "save_plots=false"),
    ]
    with (out / f"{name}.log").open("w") as log:
        code = subprocess.run(command, cwd=out, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    print(f"{name}: exit code {code}, {time.perf_counter() - began:.1f} s", flush=True)


def pairs(records: Iterable[Record], sweep: str) -> list[dict[str, object]]:
    """Return a row for each two names of one case and pass."""
    cases: dict[object, list[Record]] = defaultdict(list)
    for record in records:
        if record.status == "ok" and record.request.backend["name"] in NAMES:
            cases[record.request.case].append(record)
    rows: list[dict[str, object]] = []
    for case, several in cases.items():
        for direction in several[0].passes:
            kernels = {frozenset(one.name for one in record.passes[direction].kernels) for record in several}
            for one, other in itertools.combinations(sorted(several, key=lambda record: record.label), 2):
                timings = [record.passes[direction].timings[0] for record in (one, other)]
                medians = [medians_by_round(timing.times_us, timing.rounds) for timing in timings]
                found = paired_by_round(medians[1], medians[0])
                if found is None:
                    continue
                half = math.hypot(found.half, math.log1p(TURNS_FLOOR))
                clocks = [statistics.median(timing.clocks_mhz) for timing in timings if timing.clocks_mhz]
                rows.append(
                    {
                        "sweep": sweep,
                        "case": case.label(),  # type: ignore[attr-defined]
                        "pass": direction,
                        "one": one.label,
                        "other": other.label,
                        "one_us": round(statistics.median(timings[0].times_us), 3),
                        "other_us": round(statistics.median(timings[1].times_us), 3),
                        "ratio_off": round(100 * math.expm1(found.log_ratio), 4),
                        "half": round(100 * half, 4),
                        "inside": abs(found.log_ratio) <= half,
                        "rounds": found.rounds,
                        "uncounted": sum(len(timing.uncounted) for timing in timings),
                        "clock_mhz": round(statistics.fmean(clocks)) if clocks else "",
                        "duty": min((timing.notes.get("duty", 1.0) for timing in timings), default=1.0),
                        "kernel_sets": len(kernels),
                    }
                )
    return rows


def said(rows: list[dict[str, object]]) -> list[str]:
    """Return what the pairs of each sweep say in a line."""
    lines = []
    for sweep, group in itertools.groupby(rows, key=lambda row: row["sweep"]):
        own = list(group)
        off = sorted(abs(float(str(row["ratio_off"]))) for row in own)
        inside = sum(bool(row["inside"]) for row in own)
        lines.append(
            f"{sweep}: {len(own)} pairs, median {statistics.median(off):.2f} %, largest {off[-1]:.2f} %, "
            f"{inside} inside their interval ({100 * inside / len(own):.1f} %)"
        )
    return lines


def repeated(first: Iterable[Record], second: Iterable[Record]) -> list[str]:
    """Return how far rows of two sweeps differ, as a line."""
    times: list[dict[tuple[str, str], float]] = []
    for records in (first, second):
        times.append(
            {
                (record.request.job, direction): statistics.median(measured.timings[0].times_us)
                for record in records
                if record.status == "ok"
                for direction, measured in record.passes.items()
            }
        )
    one, other = times
    off = sorted(abs(100 * (other[key] / one[key] - 1)) for key in one.keys() & other.keys())
    if not off:
        return []
    within = sum(value <= 3 for value in off)
    return [
        f"{len(off)} rows measured twice: median {statistics.median(off):.2f} %, largest {off[-1]:.2f} %, "
        f"{100 * within / len(off):.0f} % within 3 %"
    ]


def on_cpu(out: Path) -> None:
    """Measure flash twice in turns beside a busy loop."""
    from attn_exp.core.case.case import Case
    from attn_exp.core.record.request import Measuring, Request
    from attn_exp.worker.machine.device import Machine
    from attn_exp.worker.measure import measure_case

    case = Case(batch=1, q_heads=4, kv_heads=4, q_len=64, kv_len=64, head_dim=64, value_dim=64, dtype="float32")
    measuring = Measuring(timer="cpu", also=(), precision=0.005, min_rounds=10, max_rounds=80, budget_s=0.1,
                          regime="burst", passes=("forward",), seed=1)  # fmt: skip
    backend = {"_target_": "attn_exp.backends.sdpa.Flash"}
    requests = [
        Request(job=f"{name}-0", sweep="cpu", model="cpu", device="cpu", case=case, backend=backend | {"name": name},
                measuring=measuring)
        for name in ("flash", "again")
    ]  # fmt: skip
    machine, lines = Machine.open("cpu"), []
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        for _ in range(10):
            one, other = (record.passes["forward"].timings[0] for record in measure_case(requests, machine))
            found = paired_by_round(*(medians_by_round(each.times_us, each.rounds) for each in (other, one)))
            assert found is not None
            times = " and ".join(f"{statistics.median(each.times_us):.2f} us" for each in (one, other))
            lines.append(f"{times}: {100 * math.expm1(found.log_ratio):+.2f} % +-{100 * found.half:.2f}")
    finally:
        busy.kill()
    out.mkdir(parents=True, exist_ok=True)
    (out / "cpu.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def main(out: Path, sweeps: list[Path]) -> None:
    """Run the sweeps if none is given, and write what they say."""
    out.mkdir(parents=True, exist_ok=True)
    if not sweeps:
        for name, regime in STEPS:
            run(out, name, regime)
        sweeps = [out / "multirun" / name for name, _ in STEPS]
    kept = {folder.name: list(read_folder(folder).records()) for folder in sweeps}
    rows = [row for name, records in kept.items() for row in pairs(records, name)]
    lines = said(rows)
    if {"burst", "burst_again"} <= kept.keys():
        lines += [f"burst and burst_again: {line}" for line in repeated(kept["burst"], kept["burst_again"])]
    (out / "same_kernel.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    write_rows(out / "same_kernel.csv", rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("sweeps", type=Path, nargs="*")
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    if given.cpu:
        on_cpu(given.out)
    else:
        main(given.out, given.sweeps)
