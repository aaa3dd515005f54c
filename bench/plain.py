"""python bench/plain.py OUT_FOLDER [--stall] [--rows N]: whether a job's numbers are those of a plain loop, on one GPU.

A loop of ten lines (`loop`, which uses no module of attn_exp) and jobs as sweeps measure them take turns, A B B A, in
one process. Compared are: `regime=sustained` with the second half of 3 s of the loop, `regime=burst` with its first
0.1 s after 1 s of rest, the loop's own events with `event` and `launch_bound`, and joules a call with NVML's energy
counter. With --stall the host stands still for 50 ms in each second. Writes plain.csv and plain.txt.
"""

import argparse
import contextlib
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pynvml
import torch
import torch.nn.functional as F
from rows import write_rows
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_exp.attention.inputs import make_inputs
from attn_exp.backends.base import load_backend
from attn_exp.core.case.case import Case
from attn_exp.core.conf import conf_folder, read_yaml
from attn_exp.core.record.request import Measuring, Request
from attn_exp.core.sheet.render import grid
from attn_exp.core.sheet.sheet import sheet_of
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.measure import measure

SECONDS, BURST_S, REST_S = 3.0, 0.1, 1.0
# Backend, batch, length, causal; bf16, 16 heads of 128. First the longest of PyTorch's benchmarks/transformer/sdpa.py.
ROWS = (
    ("cudnn", 1, 8192, True),
    ("cudnn", 8, 8192, True),
    ("cudnn", 16, 8192, True),
    ("cudnn", 1, 8192, False),
    ("cudnn", 8, 8192, False),
    ("cudnn", 16, 8192, False),
    ("cudnn", 16, 1024, True),
    ("cudnn", 8, 512, True),
    ("flex", 4, 4096, True),
    ("fa3", 4, 4096, True),
)
FLUSH = torch.randn(2 * torch.cuda.get_device_properties(0).L2_cache_size // 16384, 4096, device="cuda")
SUMS = torch.empty(len(FLUSH), device="cuda")


EVENTS = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(256)]
for pair in EVENTS:
    for event in pair:
        event.record()


def loop(call: Callable[[], object], seconds: float) -> list[tuple[float, float]]:
    """Call again and again for so many seconds: the moment by the GPU's clock and the time in microseconds of each."""
    found, began, start, number = [], time.perf_counter(), torch.cuda.Event(enable_timing=True), 0
    start.record()
    ahead = 2
    while time.perf_counter() - began < seconds:
        first, second = EVENTS[number % 256]
        torch.sum(FLUSH, 1, out=SUMS)
        first.record()
        call()
        second.record()
        number += 1
        if number > ahead:
            first, second = EVENTS[(number - ahead - 1) % 256]
            second.synchronize()
            found.append((start.elapsed_time(first) / 1e3, first.elapsed_time(second) * 1e3))
            ahead = 2 if found[0][1] > 5_000 else 100  # some calls are in the queue, as in a training loop
    torch.cuda.synchronize()
    return found


def settled(call: Callable[[], object]) -> tuple[float, float]:
    """The median time in the second half of a loop, and the mean power in watts in that time."""
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    loop(call, SECONDS / 2)
    before, began = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle), time.perf_counter()
    times = loop(call, SECONDS / 2)
    power = (pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) - before) / 1e3 / (time.perf_counter() - began)
    return statistics.median(us for _, us in times), power


def rested(call: Callable[[], object]) -> float:
    """The median time in the first moments after a rest."""
    torch.cuda.synchronize()
    time.sleep(REST_S)
    return statistics.median(us for at, us in loop(call, 2 * BURST_S) if at < BURST_S)


def plain_calls(name: str, batch: int, length: int, causal: bool) -> dict[str, Callable[[], object]]:
    """Forward and backward of a backend."""
    if name != "cudnn":
        inputs = make_inputs(case_of(batch, length, causal), "cuda", 7, with_gradients=True)
        calls = load_backend(config_of(name)).prepare(case_of(batch, length, causal), inputs)
        return {"forward": calls.forward, "backward": calls.backward(calls.forward())}
    q, k, v, d_out = (torch.randn(batch, 16, length, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for tensor in (q, k, v):
        tensor.requires_grad_()

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    out = forward()

    def backward() -> object:
        return torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)

    return {"forward": forward, "backward": backward}


def case_of(batch: int, length: int, causal: bool):
    return Case(
        batch=batch, q_heads=16, kv_heads=16, q_len=length, kv_len=length, head_dim=128, value_dim=128,
        dtype="bfloat16", causal=causal,
    )  # fmt: skip


def config_of(name: str):
    config = dict(read_yaml(conf_folder() / "backend" / f"{name}.yaml"))
    config.pop("about", None)
    return config


def request_of(name: str, batch: int, length: int, causal: bool, regime: str):
    """A job as a sweep has it."""
    stopping = dict(read_yaml(conf_folder() / "stopping" / "default.yaml"))
    measuring = Measuring(
        timer="device", also=("kernel", "event"), regime=regime, passes=("forward", "backward"), seed=7, **stopping
    )
    return Request(
        job="plain-0", sweep="plain", model="plain", device="cuda", case=case_of(batch, length, causal),
        backend=config_of(name), measuring=measuring,
    )  # fmt: skip


def stall_host() -> None:
    """Let this process stand still for 50 ms in each second, as a busy machine does."""
    signal.signal(signal.SIGALRM, lambda number, frame: time.sleep(0.05))
    signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)


def main(out: Path, rows_wanted: int) -> int:
    pynvml.nvmlInit()
    out.mkdir(parents=True, exist_ok=True)
    machine = Machine.open("cuda")
    stream = torch.cuda.current_stream()
    rows: list[dict[str, object]] = []
    for name, batch, length, causal in ROWS[:rows_wanted]:
        try:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if name == "cudnn" else contextlib.nullcontext():
                calls = plain_calls(name, batch, length, causal)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:150]}", flush=True)
            continue
        # By turns, A B B A.
        found: dict[str, dict[str, list[float]]] = {way: {} for way in calls}

        def add(way: str, key: str, value: float | None, found=found) -> None:
            found[way].setdefault(key, []).append(float("nan") if value is None else value)

        for order in ("plain ours", "ours plain"):
            for who in order.split():
                if who == "plain":
                    # Choosing the backend is not timed.
                    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if name == "cudnn" else contextlib.nullcontext():
                        for way, call in calls.items():
                            call()
                            add(way, "burst_plain", rested(call))
                            us, power = settled(call)
                            add(way, "plain", us)
                            add(way, "power", power)
                    continue
                for regime in ("burst", "sustained"):
                    began = time.perf_counter()
                    record = measure(request_of(name, batch, length, causal, regime), machine)
                    seconds = time.perf_counter() - began
                    if record.status != "ok":
                        print(f"{name} {batch} x {length} {regime}: {record.status}: {record.reason}", flush=True)
                        continue
                    for way, measured in record.passes.items():
                        us = record.metrics[f"{way}/time_us"]
                        add(way, "burst" if regime == "burst" else "ours", us)
                        if regime == "burst":
                            add(way, "burst_samples", float(len(measured.timings[0].times_us)))
                            continue
                        add(way, "kernel", record.metrics.get(f"{way}/kernel_time_us"))
                        add(way, "event", record.metrics.get(f"{way}/event_time_us", us))
                        add(way, "duty", record.metrics.get(f"{way}/duty"))
                        joules = record.metrics.get(f"{way}/joules_per_call")
                        add(way, "our_power", None if joules is None else joules / us * 1e6)
                        add(way, "launch_bound", float("launch_bound" in measured.flags))
                        add(way, "seconds", seconds)
                        timing, plain_us = measured.timings[0], found[way].get("plain", [0.0])[-1]
                        seen = f"{us:.1f} us, plain {plain_us:.1f}, {measured.flags}, {len(timing.times_us)} samples"
                        seen += f", duty {timing.notes.get('duty')}, {record.stages_s}"
                        print(f"{name} {batch} x {length} {way}: {seen}", flush=True)
        for way, values in found.items():
            mean = {key: statistics.fmean(several) for key, several in values.items()}
            if "ours" not in mean:
                continue
            plain_bound = mean["plain"] / mean["ours"] > 1.05
            rows.append(
                {
                    "backend": name,
                    "case": f"{batch} x {length:,} {'causal' if causal else 'full'}",
                    "pass": way,
                    "plain_us": round(mean["plain"], 2),
                    "sustained_us": round(mean["ours"], 2),
                    "sustained_off": round(100 * (mean["ours"] / mean["plain"] - 1), 2),
                    "plain_burst_us": round(mean["burst_plain"], 2),
                    "burst_us": round(mean["burst"], 2),
                    "burst_off": round(100 * (mean["burst"] / mean["burst_plain"] - 1), 2),
                    "event_off": round(100 * (mean["event"] / mean["plain"] - 1), 2),
                    "kernel_of_device": round(mean["kernel"] / mean["ours"], 4),
                    "launch_bound": bool(mean["launch_bound"] >= 0.5),
                    "plain_is_launch_bound": plain_bound,
                    "duty": round(mean["duty"], 4),
                    "power_off": round(100 * (mean["our_power"] / mean["power"] - 1), 2),
                    "job_s": round(mean["seconds"], 2),
                }
            )
        del calls
        torch.cuda.set_stream(stream)
        torch.cuda.empty_cache()
        write_rows(out / "plain.csv", rows)
    # A launch-bound call's events are the host's.
    above = [row for row in rows if float(row["plain_us"]) > 100 and not row["plain_is_launch_bound"]]
    offs = [abs(float(row["sustained_off"])) for row in above]
    bursts = [abs(float(row["burst_off"])) for row in above]
    powers = [abs(float(row["power_off"])) for row in rows if float(row["plain_us"]) > 1000]
    agree = sum(row["launch_bound"] == row["plain_is_launch_bound"] for row in rows)
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
        f"sustained: largest {max(offs):.2f} % (limit 2.5), median {statistics.median(offs):.2f} % (limit 1)",
        f"burst: largest {max(bursts):.2f} % (limit 2)",
        f"power: largest {max(powers):.2f} % (limit 5)",
        f"launch_bound: {agree} of {len(rows)} agree",
    ]
    shown = [{key: str(value) for key, value in row.items()} for row in rows]
    text = "\n".join([grid(sheet_of(shown)), "", *lines])
    (out / "plain.txt").write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--stall", action="store_true", help="the host stands still for 50 ms in each second")
    parser.add_argument("--rows", type=int, default=len(ROWS), help="the first so many of its cases")
    given = parser.parse_args()
    if given.stall:
        stall_host()
    sys.exit(main(given.out, given.rows))
