"""python bench/sustained.py OUT_FOLDER: whether what a GPU did before moves a sustained time, on one GPU.

Times one forward that the power limit holds back, and a light one, each after a rest, after a minute in which the host
compiles, after load and after other jobs, in an order that is drawn: once with the time to settle that
`stopping=default` gives, once without. Writes sustained.csv, and sustained.txt with the largest difference and what
settling costs.
"""

import csv
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tabulate import tabulate

from attn_exp.core.conf import conf_folder, read_yaml
from attn_exp.core.stats import summarize
from attn_exp.doctor.bench import attention
from attn_exp.timers import make_timer
from attn_exp.timers.loop import sample
from attn_exp.timers.settle import Settling
from attn_exp.timers.stopping import StoppingRule
from attn_exp.timers.timed_call import Call
from attn_exp.worker.machine.device import Machine

# Batch and length of the calls, and whether they are heavy; 16 heads of 128, as in power_cap.csv.
CALLS = {"heavy": (8, 8192, True), "light": (1, 512, False)}
REPEATS = 2
MINUTE = "a minute of compiling"
Row = dict[str, float | int | str]


def busy_host(seconds: float) -> None:
    """Compute on the host alone, as a compiler does."""
    since = time.perf_counter()
    while time.perf_counter() - since < seconds:
        torch.randn(512, 512) @ torch.randn(512, 512)


def load(call: Call, seconds: float) -> None:
    since = time.perf_counter()
    while time.perf_counter() - since < seconds:
        call()
        torch.cuda.synchronize()


def main(out: Path) -> None:
    machine = Machine.open("cuda")
    defaults = read_yaml(conf_folder() / "stopping" / "default.yaml")
    settle_s = defaults.pop("settle_s")
    rule = StoppingRule(**defaults)
    calls = {
        name: attention("cuda", batch=batch, length=length)[1].forward for name, (batch, length, _) in CALLS.items()
    }
    for call in calls.values():
        call()
    before: dict[str, Callable[[], None]] = {
        "a rest of 2 s": lambda: time.sleep(2.0),
        MINUTE: lambda: busy_host(60.0),
        "0.5 s of load": lambda: load(calls["heavy"], 0.5),
        "5 s of load": lambda: load(calls["heavy"], 5.0),
        "5 s of light calls": lambda: load(calls["light"], 5.0),
        "load and a rest of 0.3 s": lambda: (load(calls["heavy"], 3.0), time.sleep(0.3))[1],
    }
    rows: list[Row] = []
    order = random.Random(15)
    for repeat in range(REPEATS):
        # The minute is waited for once, by the call that what was before may move.
        tries = [
            (name, history, settles)
            for name, (_, _, heavy) in CALLS.items()
            for history in before
            for settles in (True, False)
            if history != MINUTE or (heavy and repeat == 0)
        ]
        order.shuffle(tries)
        for name, history, settles in tries:
            before[history]()
            settling = Settling(settle_s, CALLS[name][2], machine.reading, machine.environment.get("max_sm_clock_mhz"))
            spent: list[float] = []

            def settle(load: Callable[[float], float], costs: object, settling=settling, spent=spent) -> float | None:
                began = time.perf_counter()
                least_s = settling.settle(load)
                spent.append(time.perf_counter() - began)
                return least_s

            began = time.perf_counter()
            timing = sample(make_timer("device", machine.gpu), calls[name], rule, settle=settle if settles else None)
            found = summarize(timing.times_us, timing.rounds)
            rows.append(
                {
                    "call": name,
                    "before": history,
                    "settled": "unsettled" not in timing.flags if settles else "not asked",
                    "repeat": repeat,
                    "median_us": round(found.median_us, 2),
                    "mean_us": round(found.mean_us, 2),
                    "half_width": round(found.half_width or 0.0, 5),
                    "rounds": found.rounds,
                    "settling_s": round(sum(spent), 3),
                    "all_s": round(time.perf_counter() - began, 3),
                    "stop_reason": timing.stop_reason,
                }
            )
            print(rows[-1], flush=True)
    out.mkdir(parents=True, exist_ok=True)
    with (out / "sustained.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    shown = []
    for name in CALLS:
        for settles in (True, False):
            chosen = [row for row in rows if row["call"] == name and (row["settled"] != "not asked") == settles]
            medians = {
                history: statistics.median(float(row["median_us"]) for row in chosen if row["before"] == history)
                for history in {str(row["before"]) for row in chosen}
            }
            shown.append(
                [
                    name,
                    "settled" if settles else "before",
                    *(f"{medians[history]:.1f}" if history in medians else "" for history in before),
                    f"{100 * (max(medians.values()) / min(medians.values()) - 1):.2f}",
                    f"{statistics.fmean(float(row['settling_s']) for row in chosen):.2f}",
                    f"{statistics.fmean(float(row['all_s']) for row in chosen):.2f}",
                ]
            )
    heads = [
        "call",
        "",
        *(f"us after\n{history}" for history in before),
        "largest\ndifference, %",
        "settling, s",
        "all, s",
    ]
    (out / "sustained.txt").write_text(f"{tabulate(shown, heads, disable_numparse=True, stralign='right')}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
