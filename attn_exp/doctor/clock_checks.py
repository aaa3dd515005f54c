"""Checks 1 to 9 and 11: a GPU's clocks, timers and caches are correct, and comparisons and plain loops agree."""

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch

from attn_exp.core.host.hardware import datasheet_peak
from attn_exp.core.record.flags import timing_flags
from attn_exp.core.stats.paired import PairedComparison, compare_pair, margin_from_aa
from attn_exp.doctor.bench import MEASURING, SEVEN, Bench, Finding, attention, flash_request, side_by_side
from attn_exp.timers import make_timer
from attn_exp.timers.call import Call
from attn_exp.timers.gpu import SLEEP_CYCLES_PER_US
from attn_exp.timers.loop import Entry, sample, sample_turns
from attn_exp.timers.stopping import StoppingRule
from attn_exp.worker.measure import measure

_Item = TypeVar("_Item")
# How many comparisons each check makes: A/A, the injected difference, the difference below the floor.
COMPARISONS = {"cuda": (200, 60, 40), "cpu": (40, 20, 20)}
# Until the ratio is known to half a percent: a difference below the margin must not be reported by chance.
PRECISE = StoppingRule(precision=0.005, min_rounds=7, max_rounds=40, budget_s=3.0)
# How many rounds two calls need in common, and how often they are timed until they have them.
_COMMON_ROUNDS, _ATTEMPTS = 5, 3
# A sleep that is long enough to be as long as asked: shorter ones last as long as their launch.
_LEAST_SLEEP_US = 5.0
# The time between two events beside the kernel, in microseconds: 3.3 to 5.3 were seen on H200s at 37 us.
_AROUND_KERNEL_US = 6.0
INJECTED = {"cuda": (0.03, 0.003), "cpu": (0.5, 0.003)}


def equal_things_are_equal(bench: Bench) -> Finding:
    """8: A/A comparisons of two instances differ no more often than chance allows; sets the machine's margin."""
    count = COMPARISONS[bench.machine.device][0]
    comparisons = [_compare(bench, bench.call, bench.twin or bench.call) for _ in _counted(bench, range(count))]
    bench.margin, bench.comparisons = margin_from_aa([comparison.effect for comparison in comparisons]), count
    by_interval = sum(comparison.low > 0 or comparison.high < 0 for comparison in comparisons) / count
    by_rule = sum(comparison.verdict in ("faster", "slower") for comparison in comparisons) / count
    limit_interval, limit_rule = (0.05, 0.01) if bench.machine.gpu is not None else (0.25, 0.15)
    # Two hundred draws at 5 % scatter by 1.5 %; the limit applies to the probability that they are drawn from.
    most = limit_interval + 1.64 * math.sqrt(limit_interval * (1 - limit_interval) / count)
    seen = (
        f"{count} A/A: {100 * by_interval:.1f} % false by interval (at most {100 * most:.1f}, which {count} draws at "
        f"{100 * limit_interval:.0f} % reach), "
        f"{100 * by_rule:.1f} % with the floor (limit {100 * limit_rule:.0f}), margin {100 * bench.margin:.2f} %"
    )
    return Finding("equal things are equal", by_interval <= most and by_rule <= limit_rule, seen)


def differences_are_found(bench: Bench) -> Finding:
    """9: an injected difference is detected, and one below the floor never is."""
    _, *counts = COMPARISONS[bench.machine.device]
    large, small = INJECTED[bench.machine.device]
    # As a duel does: until the ratio is known well enough to tell what was injected from nothing. With fewer than 20
    # rounds a single outlier widens the interval to 4 %.
    enough = replace(
        PRECISE, precision=large / 6, min_rounds=20 if bench.machine.gpu is not None else PRECISE.min_rounds
    )
    kinds = [(_slowed(bench, large), enough)] * counts[0] + [(_slowed(bench, small), PRECISE)] * counts[1]
    every = [_compare(bench, *pair, rule) for pair, rule in _counted(bench, kinds)]
    comparisons, called = every[: counts[0]], every[counts[0] :]
    power = sum(comparison.verdict == "faster" for comparison in comparisons) / len(comparisons)
    false = sum(comparison.verdict in ("faster", "slower") for comparison in called)
    allowed = 0 if bench.machine.gpu is not None else len(called) * 15 // 100
    effect = statistics.median(comparison.effect for comparison in comparisons)
    seen = (
        f"+{100 * large:.0f} % (measured: {100 * effect:+.2f}) detected in {100 * power:.0f} % of {len(comparisons)} "
        f"(at least 95), "
        f"+{100 * small:.1f} % called a difference in {false} of {len(called)} (at most {allowed})"
    )
    return Finding("differences are found", power >= 0.95 and false <= allowed, seen)


def _compare(bench: Bench, one: Call, two: Call, rule: StoppingRule = SEVEN) -> PairedComparison:
    # With rests, as in sweeps and duels: a capped GPU's clock changes from block to block. Blocks below the highest
    # clock do not count. If that leaves the calls too few rounds in common, they are timed again.
    for _ in range(_ATTEMPTS):
        medians_one, medians_two = side_by_side(bench, one, two, rule=rule, rests=bench.machine.gpu is not None)
        if len(medians_one.keys() & medians_two.keys()) >= _COMMON_ROUNDS:
            break
    return compare_pair(medians_one, medians_two, bench.margin)


def _counted(bench: Bench, items: Sequence[_Item]) -> Iterator[_Item]:
    """Return the items, and tell the bench which share of them is done."""
    for index, item in enumerate(items):
        bench.progress(index / len(items))
        yield item


def _slowed(bench: Bench, share: float) -> tuple[Call, Call]:
    """Return the bench's call, and one with this share of additional work.

    On a GPU both launch a second kernel, a sleep, whose launch may take more than 0.3 % of the call.
    """
    if bench.machine.gpu is not None:

        def with_sleep(cycles: int) -> None:
            bench.call()
            torch.cuda._sleep(cycles)

        least = int(_LEAST_SLEEP_US * SLEEP_CYCLES_PER_US)
        return partial(with_sleep, least), partial(with_sleep, least + int(share * bench.call_us * SLEEP_CYCLES_PER_US))

    def with_spin(share: float) -> None:
        bench.call()
        until = time.perf_counter() + share * bench.call_us / 1e6
        while time.perf_counter() < until:
            pass

    return partial(with_spin, 0.0), partial(with_spin, share)


def sleep_is_linear(bench: Bench) -> Finding:
    """1: the GPU's sleep kernel is linear, and its slope is the SM clock."""
    gpu = bench.machine.gpu
    assert gpu is not None
    cycles = [200_000, 400_000, 800_000, 1_600_000]
    sleeps = [partial(torch.cuda._sleep, count) for count in cycles]
    entries = [Entry(make_timer(bench.timer, gpu), sleep, bench.scope) for sleep in sleeps]
    timings = [one for one in sample_turns(entries, SEVEN, card=bench.machine.card) if one is not None]
    times = [statistics.median(timing.times_us) for timing in timings]
    # For some 0.3 s after load the clock is a step of 15 MHz lower, also at rest.
    measured = [us * statistics.median(timing.clocks_mhz or (1.0,)) for us, timing in zip(times, timings, strict=True)]
    steps = zip(pairwise(measured), pairwise(cycles), strict=True)
    slopes = [(high - low) / (more - less) for (low, high), (less, more) in steps]
    whole = (measured[-1] - measured[0]) / (cycles[-1] - cycles[0])
    bend = max(abs(step / whole - 1) for step in slopes)
    slope = (times[-1] - times[0]) / (cycles[-1] - cycles[0])
    seen = f"bends by {100 * bend:.2f} % at one clock (limit 1), slope {1 / slope:.0f} MHz"
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
    """3: a copy of 1 GiB at 80 to 100 % of the datasheet's bandwidth: H200s had 84.8 to 85 %."""
    speed = bench.machine.ceilings_for("bfloat16")["copy_bytes_per_s"]
    peak = datasheet_peak(bench.machine.environment.get("gpu", ""))
    if peak is None:
        return Finding("a large copy", True, f"{speed / 1e12:.2f} TB/s; no datasheet figure for this GPU")
    share = speed / peak.bytes_per_s
    return Finding("a large copy", 0.80 <= share <= 1.0, f"{speed / 1e12:.2f} TB/s, {100 * share:.0f} % of {peak.name}")


def twice_the_work_takes_twice_as_long(bench: Bench) -> Finding:
    """4: time scales with the batch, and with the square of the length."""
    on_gpu = bench.machine.gpu is not None
    # At 4,096 tokens the blocks' fixed work makes doubling the length cost only 3.77 to 3.93 times (H200).
    device, batch, length, heads = ("cuda", 1, 8192, 16) if on_gpu else ("cpu", 2, 256, 2)
    if on_gpu:
        # With this many blocks of 128 queries all multiprocessors finish together, at every size.
        heads = bench.machine.environment["multiprocessors"] // 4
    ratios = []
    for larger_batch, larger_length in ((2 * batch, length), (batch, 2 * length)):
        _, small = attention(device, batch=batch, length=length, heads=heads)
        _, large = attention(device, batch=larger_batch, length=larger_length, heads=heads)
        # With rest before every block: otherwise only the longer call would reach the power cap.
        once, doubled = side_by_side(bench, small.forward, large.forward, rests=on_gpu)
        # Other programs on a CPU only add to a time.
        typical = statistics.median if on_gpu else min
        ratios.append(typical(doubled.values()) / typical(once.values()))
    by_batch, by_length = ratios
    limit_batch, limit_length = (0.03, 0.2) if on_gpu else (0.5, 1.5)
    passed = abs(by_batch - 2) <= limit_batch and abs(by_length - 4) <= limit_length
    seen = (
        f"twice the batch {by_batch:.3f} x (2 +-{limit_batch}), twice the length {by_length:.3f} x (4 +-{limit_length})"
    )
    return Finding("time grows with the work", passed, seen)


def timers_agree(bench: Bench) -> Finding:
    """5: device, kernel and graph agree on one call, interleaved."""
    gpu, seen, passed = bench.machine.gpu, [], True
    # Both calls are short: `kernel` runs those above 1 ms under load, at another clock.
    for batch, length in ((2, 4096), (2, 1024)):
        _, calls = attention("cuda", batch=batch, length=length)
        entries = [Entry(make_timer(name, gpu), calls.forward, calls.scope) for name in ("device", "kernel", "graph")]
        # With rest before every block: a profiler session begins with a pause, after which a capped GPU is faster.
        timings = sample_turns(entries, SEVEN, card=bench.machine.card)
        device_us, kernel_us, graph_us = (statistics.median(timing.times_us) for timing in timings if timing)
        limit = 2 + 0.01 * device_us
        passed &= agree(device_us, kernel_us, graph_us, limit)
        seen.append(
            f"at {device_us:.0f} us kernel {device_us - kernel_us:+.1f} (-{limit:.1f} to "
            f"+{limit + _AROUND_KERNEL_US:.1f}), graph {device_us - graph_us:+.1f} us (limit {limit:.1f})"
        )
    return Finding("timers agree", passed, "; ".join(seen))


def agree(device_us: float, kernel_us: float, graph_us: float, limit_us: float) -> bool:
    """Return whether three timers of one call agree, where `device` has the time between events and kernel as well."""
    off_us = device_us - kernel_us
    return -limit_us <= off_us <= limit_us + _AROUND_KERNEL_US and abs(device_us - graph_us) <= limit_us


def a_busy_host_does_not_count(bench: Bench) -> Finding:
    """6: a busy host between launches changes `event`, not `device`, and sets launch_bound."""
    gpu = bench.machine.gpu
    assert gpu is not None
    # Copies, since their time hardly depends on the GPU's rest and clocks.
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

    prompt_us, late_us = (statistics.median(medians.values()) for medians in side_by_side(bench, twice, late))
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
    # Without the launch, which takes as long as the read itself.
    small, large = (cold - launch_us) / (hot - launch_us), cold_large / hot_large
    seen = (
        f"16 MB cold {small:.2f} x hot (at least 1.5; {cold:.1f} and {hot:.1f} us, {launch_us:.1f} of them launch), "
        f"512 MB {large:.3f} x (1 +-0.02)"
    )
    return Finding("the flush makes caches cold", small >= 1.5 and abs(large - 1) <= 0.02, seen)


def _read_us(bench: Bench, megabytes: float) -> tuple[float, float]:
    """Return the times of a read of `megabytes`, hot and cold, in microseconds: medians of twenty each, interleaved."""
    gpu = bench.machine.gpu
    assert gpu is not None
    # Sums of rows, so that no second kernel has to combine them.
    source = torch.randn(max(1, int(megabytes * 2**20) // 16384), 4096, device="cuda")
    sums = torch.empty(len(source), device="cuda")
    times: dict[bool, list[float]] = {True: [], False: []}
    for index in range(40):
        hot = index % 2 == 0
        gpu.sleep_us(300)
        gpu.flush("cold")
        if hot:
            torch.sum(source, 1, out=sums)
        first = gpu.event()
        torch.sum(source, 1, out=sums)
        second = gpu.event()
        gpu.synchronize()
        times[hot].append(gpu.elapsed_us(first, second))
    return statistics.median(times[True]), statistics.median(times[False])


# As sweeps measure a job under load.
SUSTAINED = replace(MEASURING, also=(), regime="sustained")
_LOOP_S = 3.0


def a_plain_loop_takes_as_long(bench: Bench) -> Finding:
    """11: a job has the time of a plain loop of its call, by turns (A B B A), also when both have one clock."""
    passed, seen = True, []
    for batch in (1, 16):
        case, calls = attention("cuda", batch=batch, length=8192)
        request = flash_request("cuda", case, SUSTAINED)
        turns: list[tuple[float, ...]] = []
        for is_plain_first in (True, False):
            plain = _loop(bench, calls.forward) if is_plain_first else None
            record = measure(request, bench.machine)
            if record.status != "ok":
                return Finding("a plain loop takes as long", False, f"{record.status}: {record.reason}")
            job = record.metrics["forward/time_us"], record.metrics["forward/clock_mhz"]
            turns.append((*job, *(plain or _loop(bench, calls.forward))))
        ours_us, ours_mhz, plain_us, plain_mhz = (statistics.fmean(turn) for turn in zip(*turns, strict=True))
        ratio, at_one_clock = ours_us / plain_us, ours_us * ours_mhz / (plain_us * plain_mhz)
        # Under a power cap a clock moves in steps of 15 MHz, 0.9 %, and a job ends before it has settled on one.
        passed &= abs(ratio - 1) <= 0.025 and abs(at_one_clock - 1) <= 0.01
        seen.append(
            f"{batch} x 8,192: {ours_us:,.0f} us at {ours_mhz:,.0f} MHz, a loop {plain_us:,.0f} at {plain_mhz:,.0f}, "
            f"{100 * (ratio - 1):+.2f} % (limit 2.5), {100 * (at_one_clock - 1):+.2f} % at one clock (limit 1)"
        )
    return Finding("a plain loop takes as long", passed, "; ".join(seen))


def _loop(bench: Bench, call: Call) -> tuple[float, float]:
    """Return a call's median time in the second half of a plain loop in microseconds, and its clock there in MHz."""
    gpu, times, began = bench.machine.gpu, list[float](), time.perf_counter()
    assert gpu is not None
    before, stamps = None, list[Any]()
    with bench.scope():
        while (passed_s := time.perf_counter() - began) < _LOOP_S:
            if passed_s > _LOOP_S / 2 and not stamps:
                stamps.append(gpu.stamp())
            gpu.flush("cold")
            first = gpu.event()
            call()
            now = first, gpu.event()
            if before is not None:
                gpu.wait(before[1])
                if stamps:
                    times.append(gpu.elapsed_us(*before))
            before = now
        stamps.append(gpu.stamp())
    gpu.synchronize()
    span = gpu.span(stamps[0], stamps[1])
    return statistics.median(times), math.nan if span is None else span.clock_mhz
