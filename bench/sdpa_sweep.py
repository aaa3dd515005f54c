"""python bench/sdpa_sweep.py OUT_FOLDER [OVERRIDE ...]: attn_exp against a plain loop over S1's 30 configurations.

Runs bench/plain_loop.py and `python -m attn_exp -m +experiment=sdpa_sweep OVERRIDE ...` as processes of their own on
one GPU, start-up included, in the order plain, ours, ours, plain, and compares wall time and kernel times. The plain
loop's backwards accumulate gradients: those above 50 us are compared with the override accumulate=true alone. Writes
the table, its CSV, the records, agreement.csv and summary.json.
"""

import csv
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from attn_exp.core.record.flags import timing_flags
from attn_exp.core.record.record import Record, Timing
from attn_exp.core.stats.summary import summarize
from attn_exp.results.read import read_folder

HERE = Path(__file__).resolve().parent
SMALL_US = 50.0


def timed(command: list[str], cwd: Path) -> float:
    """Wall seconds of a command that must succeed."""
    began = time.perf_counter()
    subprocess.run(command, cwd=cwd, check=True)
    return time.perf_counter() - began


Times = dict[tuple[int, int, bool, str], float]


def plain_times(path: Path) -> Times:
    """Kernel time in microseconds by batch, length, causal and pass."""
    found = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            for direction in ("forward", "backward"):
                key = int(row["batch"]), int(row["seq_len"]), row["causal"] == "True", direction
                found[key] = float(row[f"{direction}_us"])
    return found


def kernel_times(records: list[Record]) -> Times:
    """The same by attn_exp's `kernel` timer."""
    found = {}
    for record in records:
        if record.status != "ok":
            continue
        for direction, measured in record.passes.items():
            timing = next(timing for timing in measured.timings if timing.timer == "kernel")
            case = record.request.case
            found[case.batch, case.q_len, case.causal, direction] = summarize(timing.times_us, timing.rounds).median_us
    return found


def unstable(timing: Timing) -> bool:
    return "unstable" in timing_flags(timing, ())


def read(folder: Path) -> list[Record]:
    return list(read_folder(folder).records())


def spread(one: Times, other: Times, direction: str = "forward") -> list[float]:
    """Relative differences of a pass's times above 50 us."""
    return [abs(other[key] / value - 1) for key, value in one.items() if key[-1] == direction and value > SMALL_US]


def mean(one: Times, other: Times) -> Times:
    return {key: (value + other[key]) / 2 for key, value in one.items()}


def main(out: Path, overrides: list[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    seconds: dict[str, list[float]] = {"plain": [], "ours": []}
    start_up_s, end_s = [], []
    for who, name in (("plain", "one"), ("ours", "one"), ("ours", "two"), ("plain", "two")):
        if who == "plain":
            command = [sys.executable, str(HERE / "plain_loop.py"), str(out / f"plain-{name}.csv")]
        else:
            command = [sys.executable, "-m", "attn_exp", "-m", "+experiment=sdpa_sweep", f"sweep={name}", *overrides]
        started = time.time()
        seconds[who].append(timed(command, out))
        if who == "ours":
            records = read(out / "multirun" / name)
            start_up_s.append(min(record.started_at for record in records) - started)
            end_s.append(started + seconds[who][-1] - max(record.finished_at for record in records))
    plain = [plain_times(out / f"plain-{name}.csv") for name in ("one", "two")]
    runs = [read(out / "multirun" / name) for name in ("one", "two")]
    ours = [kernel_times(records) for records in runs]
    for name in ("table.csv", "table.txt"):
        (out / name).write_bytes((out / "multirun" / "one" / name).read_bytes())
    with (out / "agreement.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        names = ("plain_one_us", "plain_two_us", "kernel_one_us", "kernel_two_us")
        writer.writerow(("batch", "seq_len", "causal", "pass", *names, "ours_over_plain"))
        for key in plain[0]:
            four = [times[key] for times in (*plain, *ours)]
            writer.writerow((*key, *(f"{us:.3f}" for us in four), f"{sum(four[2:]) / sum(four[:2]):.4f}"))
    off = spread(mean(*plain), mean(*ours))
    records = runs[0]
    ranking = [measured.timings[0] for record in records for measured in record.passes.values() if measured.timings]
    stages = sorted({stage for record in records for stage in record.stages_s})
    summary = {
        "command": " ".join(["python bench/sdpa_sweep.py OUT_FOLDER", *overrides]),
        "gpu": records[0].environment.get("gpu"),
        "torch": records[0].environment["versions"]["torch"],
        "plain_loop_s": round(sum(seconds["plain"]) / 2, 2),
        "attn_exp_s": round(sum(seconds["ours"]) / 2, 2),
        "plain_loop_runs_s": [round(value, 2) for value in seconds["plain"]],
        "attn_exp_runs_s": [round(value, 2) for value in seconds["ours"]],
        "ratio": round(sum(seconds["ours"]) / sum(seconds["plain"]), 3),
        "start_up_s": [round(value, 2) for value in start_up_s],
        "end_s": [round(value, 2) for value in end_s],
        "stages_s": {stage: round(sum(record.stages_s.get(stage, 0.0) for record in records), 3) for stage in stages},
        "forwards_above_50_us": len(off),
        "within_3_percent": sum(value <= 0.03 for value in off),
        "largest_disagreement": round(max(off), 4),
        "median_disagreement": round(statistics.median(off), 4),
        "plain_with_itself_largest": round(max(spread(*plain)), 4),
        "ours_with_itself_largest": round(max(spread(*ours)), 4),
        "unstable_passes": sum(unstable(timing) for timing in ranking),
        "passes": len(ranking),
        "ok": sum(record.status == "ok" for record in records),
    }
    if "accumulate=true" in overrides:
        backwards = spread(mean(*plain), mean(*ours), "backward")
        summary["backwards_above_50_us"] = len(backwards)
        summary["backwards_largest_disagreement"] = round(max(backwards), 4)
        summary["backwards_median_disagreement"] = round(statistics.median(backwards), 4)
        summary["plain_backwards_with_themselves_largest"] = round(max(spread(*plain, "backward")), 4)
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
