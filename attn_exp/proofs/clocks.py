"""Proofs 1 to 7: clocks, timers and caches of a GPU tell the truth, and time grows with the work."""

import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from attn_exp.flags import timing_flags
from attn_exp.hardware import datasheet_peak
from attn_exp.measure import BURST_REST_S
from attn_exp.proofs.bench import SEVEN, Bench, Finding, attention, median_us, side_by_side
from attn_exp.timers import make_timer
from attn_exp.timers.loop import Entry, sample, sample_rivals
from attn_exp.verdict import abba_order


def sleep_is_linear(bench: Bench) -> Finding:
    """1: the GPU's sleep kernel is linear, and its slope is the SM clock."""
    gpu = bench.machine.gpu
    assert gpu is not None
    cycles = [200_000, 400_000, 800_000, 1_600_000]
    times = [median_us(bench, "device", partial(torch.cuda._sleep, count)) for count in cycles]
    slopes = [(high - low) / (more - less) for low, high, less, more in _steps(times, cycles)]
    slope = (times[-1] - times[0]) / (cycles[-1] - cycles[0])
    bend = max(abs(one / slope - 1) for one in slopes)
    seen = f"bends by {100 * bend:.2f} % (limit 1), slope {1 / slope:.0f} MHz"
    clock = bench.machine.environment.get("max_sm_clock_mhz")
    off = abs(1 / slope / clock - 1) if clock else 0.0
    seen += (
        f", {100 * off:.2f} % from the SM clock of {clock:.0f} MHz (limit 1)" if clock else ", no NVML to compare with"
    )
    return Finding("a sleep of known length is measured", bend <= 0.01 and off <= 0.01, seen)


def event_floor_is_known(bench: Bench) -> Finding:
    """2: event quantum and floor."""
    floor, quantum = (bench.machine.environment[name] for name in ("event_floor_us", "event_quantum_us"))
    seen = f"an empty pair of events measures {floor:.2f} us, in steps of {1000 * quantum:.0f} ns"
    return Finding("the events' floor and step", 0 <= floor < 20, seen)


def copy_reaches_the_datasheet(bench: Bench) -> Finding:
    """3: a copy of 1 GiB at 85 to 100 % of the datasheet's bandwidth."""
    speed = bench.machine.ceilings_for("bfloat16")["copy_bytes_per_s"]
    peak = datasheet_peak(bench.machine.environment.get("gpu", ""))
    if peak is None:
        return Finding("a large copy", True, f"{speed / 1e12:.2f} TB/s; no datasheet figure for this GPU")
    share = speed / peak.bytes_per_s
    return Finding("a large copy", 0.85 <= share <= 1.0, f"{speed / 1e12:.2f} TB/s, {100 * share:.0f} % of {peak.name}")


def twice_the_work_takes_twice_as_long(bench: Bench) -> Finding:
    """4: time scales with batch, and with the square of the length."""
    on_gpu = bench.machine.gpu is not None
    # At 4,096 tokens the blocks' fixed work still makes doubling the length cost 3.77 to 3.93 times (H200).
    device, batch, length, heads = ("cuda", 1, 8192, 16) if on_gpu else ("cpu", 2, 256, 2)
    if on_gpu:
        # So many blocks of 128 queries that all multiprocessors finish together, at every size.
        heads = bench.machine.environment["multiprocessors"] // 4
    ratios = []
    for larger_batch, larger_length in ((2 * batch, length), (batch, 2 * length)):
        _, small = attention(device, batch=batch, length=length, heads=heads)
        _, large = attention(device, batch=larger_batch, length=larger_length, heads=heads)
        # Rested before every block: the longer call would meet the power cap, and the shorter not.
        one, two = side_by_side(bench, small.forward, large.forward, rest_s=BURST_REST_S if on_gpu else 0.0)
        ratios.append(statistics.median(two) / statistics.median(one))
    by_batch, by_length = ratios
    limit_batch, limit_length = (0.03, 0.2) if on_gpu else (0.5, 1.5)
    passed = abs(by_batch - 2) <= limit_batch and abs(by_length - 4) <= limit_length
    seen = (
        f"twice the batch {by_batch:.3f} x (2 +-{limit_batch}), twice the length {by_length:.3f} x (4 +-{limit_length})"
    )
    return Finding("time grows with the work", passed, seen)


def timers_agree(bench: Bench) -> Finding:
    """5: device, kernel and graph time one call alike, side by side."""
    gpu, seen, passed = bench.machine.gpu, [], True
    for batch, length in ((5, 4096), (2, 1024)):
        _, calls = attention("cuda", batch=batch, length=length)
        entries = [Entry(make_timer(name, gpu), calls.forward) for name in ("device", "kernel", "graph")]
        # Rested before every block: a profiler session begins with a pause, which a capped GPU comes out of faster.
        timings = sample_rivals(entries, SEVEN, order=abba_order, rest_s=BURST_REST_S)
        device_us, kernel_us, graph_us = (statistics.median(timing.times_us) for timing in timings)
        limit = 0.01 * device_us if device_us >= 1000 else 2 + 0.03 * device_us
        off = {"kernel": device_us - kernel_us, "graph": device_us - graph_us}
        passed &= all(abs(difference) <= limit for difference in off.values())
        said = ", ".join(f"{name} {difference:+.1f}" for name, difference in off.items())
        seen.append(f"at {device_us:.0f} us {said} us (limit {limit:.1f})")
    return Finding("timers agree", passed, "; ".join(seen))


def a_busy_host_does_not_count(bench: Bench) -> Finding:
    """6: a spin of the host between launches moves `event`, not `device`, and sets launch_bound."""
    gpu = bench.machine.gpu
    assert gpu is not None
    # Copies, since their time does not hang on how the GPU was rested and clocked.
    source = torch.randn(1 << 26, device="cuda")
    copy = partial(torch.empty_like(source).copy_, source)

    def twice() -> None:
        copy()
        copy()

    def late() -> None:
        copy()
        until = gpu.now_us() + 1000
        while gpu.now_us() < until:
            pass
        copy()

    prompt_us, late_us = (statistics.median(times) for times in side_by_side(bench, twice, late))
    event = sample(make_timer("event", gpu), late, SEVEN)
    event_us = statistics.median(event.times_us)
    flags = timing_flags(replace(event, times_us=(late_us,) * 7, rounds=tuple(range(7)), timer="device"), (event,))
    moved = late_us / prompt_us - 1
    flag = "set" if "launch_bound" in flags else "missing"
    seen = f"device {100 * moved:+.2f} % (limit 1), event {event_us / late_us:.1f} x, flag {flag}"
    return Finding("a busy host does not count", abs(moved) <= 0.01 and "launch_bound" in flags, seen)


def the_flush_makes_caches_cold(bench: Bench) -> Finding:
    """7: a small read is faster hot than cold, a large one is not."""
    launch_us, _ = _read_us(bench, 0.001)
    hot, cold = _read_us(bench, 16)
    hot_large, cold_large = _read_us(bench, 512)
    # Without the launch, which is as long as the read itself.
    small, large = (cold - launch_us) / (hot - launch_us), cold_large / hot_large
    seen = (
        f"16 MB cold {small:.2f} x hot (at least 1.5; {cold:.1f} and {hot:.1f} us, {launch_us:.1f} of them launch), "
        f"512 MB {large:.3f} x (1 +-0.02)"
    )
    return Finding("the flush makes caches cold", small >= 1.5 and abs(large - 1) <= 0.02, seen)


def _read_us(bench: Bench, megabytes: float) -> tuple[float, float]:
    """How long a read of so much takes hot and cold, in microseconds: medians of twenty each, taken in turns."""
    gpu = bench.machine.gpu
    assert gpu is not None
    # Sums of rows, so that no second pass has to join them.
    source = torch.randn(max(1, int(megabytes * 2**20) // 16384), 4096, device="cuda")
    sums = torch.empty(len(source), device="cuda")
    times: dict[bool, list[float]] = {True: [], False: []}
    for index in range(40):
        hot = index % 2 == 0
        gpu.sleep_us(300)
        gpu.flush()
        if hot:
            torch.sum(source, 1, out=sums)
        first = gpu.event()
        torch.sum(source, 1, out=sums)
        second = gpu.event()
        gpu.synchronize()
        times[hot].append(gpu.elapsed_us(first, second))
    return statistics.median(times[True]), statistics.median(times[False])


def _steps(times: list[float], cycles: list[int]) -> Iterator[tuple[float, float, int, int]]:
    return zip(times, times[1:], cycles, cycles[1:], strict=False)
