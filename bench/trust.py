"""python bench/trust.py OUT_FOLDER: evidence for the measuring method, on one GPU.

power_cap.csv and .png: one large call again and again for seconds, its time beside the SM clock. blocked.csv and .png:
forward attention over lengths by `device` (stream blocked) and `event` (not), beside the kernels' own time. cost.csv:
wall time of measuring a cell, against Triton's do_bench.
"""

import csv
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from attn_exp.core.host.nvml import GpuState
from attn_exp.doctor.bench import attention
from attn_exp.timers import make_timer
from attn_exp.timers.loop import sample
from attn_exp.timers.stopping import StoppingRule
from attn_exp.worker.machine.device import Machine

SECONDS = 4.0
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
# The default's rule, and one that waits for its precision.
RULES = {"default": StoppingRule(0.005, 7, 40, 0.1), "patient": StoppingRule(0.005, 7, 40, 1.5)}
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"


def power_cap(machine: Machine, state: GpuState, out: Path) -> None:
    _, calls = attention("cuda", batch=8, length=8192)
    timer = make_timer("device", machine.gpu)
    calls.forward()
    time.sleep(2.0)
    timer.estimate(calls.forward)
    time.sleep(1.0)
    began, rows = time.perf_counter(), []
    while (now := time.perf_counter() - began) < SECONDS:
        times = timer.block(calls.forward, 3).times_us
        reading = state.read()
        rows.append(
            (f"{now:.4f}", f"{statistics.median(times):.1f}", reading["sm_clock_mhz"], f"{reading['power_w']:.0f}")
        )
    write(out / "power_cap.csv", ("seconds", "time_us", "sm_clock_mhz", "power_w"), rows)
    figure = canvas((7.5, 4))
    panel = figure.subplots()
    seconds = [float(row[0]) for row in rows]
    panel.plot(seconds, [float(row[1]) / 1e3 for row in rows], color=BLUE)
    panel.set(xlabel="seconds of load", ylabel="time of one call, ms (blue)", title=title(machine, "b8 h16 s8192 d128"))
    other = panel.twinx()
    other.plot(seconds, [row[2] for row in rows], color=ORANGE, linewidth=1)
    other.set_ylabel("SM clock, MHz (orange)")
    figure.savefig(out / "power_cap.png", dpi=100)


def blocked(machine: Machine, out: Path) -> None:
    rows = []
    for length in LENGTHS:
        # With gradients, as in training: autograd makes the host slower.
        _, calls = attention("cuda", batch=1, length=length, gradients=True)
        passes = {"forward": calls.forward, "backward": calls.backward(calls.forward())}
        for direction, call in passes.items():
            call()
            medians = [
                statistics.median(sample(make_timer(name, machine.gpu), call, RULES["patient"]).times_us)
                for name in ("kernel", "device", "event", "graph")
            ]
            figures = (f"{median:.2f}" for median in medians)
            rows.append((length, direction, *figures, f"{medians[2] / medians[1]:.2f}"))
    names = ("seq_len", "pass", "kernel_us", "device_us", "event_us", "graph_us", "event_over_device")
    write(out / "blocked.csv", names, rows)
    figure = canvas((10, 4))
    for panel, direction in zip(figure.subplots(1, 2), ("forward", "backward"), strict=True):
        shown = [row for row in rows if row[1] == direction]
        for column, name, colour, style in (
            (2, "kernel: the kernels alone", GREEN, "s--"),
            (3, "device: stream blocked", BLUE, "o-"),
            (4, "event: unblocked", ORANGE, "^-"),
        ):
            panel.plot(LENGTHS, [float(row[column]) for row in shown], style, color=colour, label=name, markersize=5)
        panel.set(xscale="log", yscale="log", xlabel="sequence length", ylabel="time of one call, us", title=direction)
        panel.set_xticks(LENGTHS, [str(length) for length in LENGTHS])
        panel.minorticks_off()
        panel.legend()
    figure.suptitle(title(machine, "flash, b1 h16 d128"), fontsize=10)
    figure.savefig(out / "blocked.png", dpi=100)


def cost(machine: Machine, out: Path) -> None:
    from triton.testing import do_bench

    rows = []
    for batch, length in ((16, 1024), (1, 8192), (4, 4096), (8, 8192), (16, 8192)):
        _, calls = attention("cuda", batch=batch, length=length)
        calls.forward()
        theirs_s, theirs_ms = timed(partial(do_bench, calls.forward, return_mode="median"))
        row = [batch, length, f"{1000 * theirs_ms:.1f}", f"{theirs_s:.3f}"]
        for rule in RULES.values():
            ours_s, timing = timed(partial(sample, make_timer("device", machine.gpu), calls.forward, rule))
            row += [
                f"{statistics.median(timing.times_us):.1f}",
                f"{ours_s:.3f}",
                f"{ours_s / theirs_s:.2f}",
                timing.stop_reason,
            ]
        rows.append(row)
    names = [f"{rule}_{what}" for rule in RULES for what in ("us", "s", "over_do_bench", "stopped")]
    write(out / "cost.csv", ("batch", "seq_len", "do_bench_us", "do_bench_s", *names), rows)


def timed(run):
    torch.cuda.synchronize()
    began = time.perf_counter()
    result = run()
    torch.cuda.synchronize()
    return time.perf_counter() - began, result


def title(machine: Machine, what: str) -> str:
    return f"{machine.environment['gpu']}, torch {torch.__version__}, {what}"


def canvas(size):
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write(path: Path, header, rows) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])
    print(path.read_text())


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    opened = Machine.open("cuda")
    assert opened.state is not None
    power_cap(opened, opened.state, folder)
    opened.ceilings_for("bfloat16")
    blocked(opened, folder)
    cost(opened, folder)
