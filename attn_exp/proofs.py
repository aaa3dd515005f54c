"""python -m attn_exp.proofs DEVICE: the proofs that a machine is measured right; `python -m attn_exp.doctor` runs them.

Each proof is a function from a bench to a finding: what was asked, what was seen, and whether that is good enough.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from attn_exp.backends.base import Calls, Unavailable, load_backend
from attn_exp.backends.sdpa import Flash, Math
from attn_exp.calibration import Calibration, device_key, write_calibration
from attn_exp.case import Case
from attn_exp.flags import telemetry_flags, timing_flags
from attn_exp.hardware import datasheet_peak
from attn_exp.inputs import Inputs, make_inputs
from attn_exp.machine import Machine
from attn_exp.measure import BURST_REST_S, measure
from attn_exp.record import Measuring, Request, Timing
from attn_exp.stats import round_medians
from attn_exp.timers import make_timer
from attn_exp.timers.kernel import Activity, split_calls
from attn_exp.timers.loop import Call, Entry, StoppingRule, sample, sample_rivals
from attn_exp.verdict import DELTA_FLOOR, Comparison, abba_order, compare_pair, delta_from_aa

# Seven rounds whatever they say: every comparison costs the same.
SEVEN = StoppingRule(precision=0.0, min_rounds=7, max_rounds=7, budget_s=0.0)
MEASURING = Measuring(
    timer="device",
    also=("kernel", "event"),
    precision=0.01,
    min_rounds=5,
    max_rounds=10,
    budget_s=0.1,
    regime="sustained",
    passes=("forward",),
    seed=7,
    tolerance={"out": 0.01, "gradient": 0.015},
)
COMPARISONS = {"cuda": (200, 60, 40), "cpu": (40, 20, 20)}
# Until the ratio is known to half a percent: what is smaller than delta must not be called by chance.
PRECISE = StoppingRule(precision=0.005, min_rounds=7, max_rounds=40, budget_s=3.0)
INJECTED = {"cuda": (0.03, 0.003), "cpu": (0.5, 0.003)}


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report."""

    name: str
    passed: bool
    seen: str


@dataclass
class Bench:
    """The machine, a call of about a millisecond on it, and what the proofs found that later runs need."""

    machine: Machine
    call: Call
    calls: Calls
    call_us: float
    delta: float = DELTA_FLOOR
    comparisons: int = 0

    @property
    def timer(self) -> str:
        """The timer that ranks on this device."""
        return "device" if self.machine.gpu is not None else "cpu"


def attention(
    device: str, *, batch: int, length: int, heads: int = 16, dim: int = 128, gradients: bool = False
) -> tuple[Case, Calls]:
    """SDPA's flash attention on fresh inputs."""
    case = Case(
        batch=batch,
        q_heads=heads,
        kv_heads=heads,
        q_len=length,
        kv_len=length,
        head_dim=dim,
        value_dim=dim,
        dtype="bfloat16" if device == "cuda" else "float32",
    )
    inputs = make_inputs(case, device, 7, with_gradients=gradients)
    return case, load_backend({"_target_": "attn_exp.backends.sdpa.Flash", "name": "flash"}).prepare(case, inputs)


def sleep_is_linear(bench: Bench) -> Finding:
    """1: the GPU's sleep kernel is linear, and its slope is the SM clock."""
    gpu = bench.machine.gpu
    assert gpu is not None
    cycles = [200_000, 400_000, 800_000, 1_600_000]
    times = [_median(bench, "device", partial(torch.cuda._sleep, count)) for count in cycles]
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
    device, batch, length, heads = ("cuda", 4, 4096, 16) if on_gpu else ("cpu", 2, 256, 2)
    if on_gpu:
        # So many blocks of 128 queries that all multiprocessors finish together, at every size.
        heads = bench.machine.environment["multiprocessors"] // 4
    ratios = []
    for larger_batch, larger_length in ((2 * batch, length), (batch, 2 * length)):
        _, small = attention(device, batch=batch, length=length, heads=heads)
        _, large = attention(device, batch=larger_batch, length=larger_length, heads=heads)
        one, two = _side_by_side(bench, small.forward, large.forward)
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

    prompt_us, late_us = (statistics.median(times) for times in _side_by_side(bench, twice, late))
    event = sample(make_timer("event", gpu), late, SEVEN)
    event_us = statistics.median(event.times_us)
    flags = timing_flags(replace(event, times_us=(late_us,) * 7, rounds=tuple(range(7)), timer="device"), (event,))
    moved = late_us / prompt_us - 1
    flag = "set" if "launch_bound" in flags else "missing"
    seen = f"device {100 * moved:+.2f} % (limit 1), event {event_us / late_us:.1f} x, flag {flag}"
    return Finding("a busy host does not count", abs(moved) <= 0.01 and "launch_bound" in flags, seen)


def the_flush_makes_caches_cold(bench: Bench) -> Finding:
    """7: a small read is faster hot than cold, a large one is not."""
    gpu = bench.machine.gpu
    assert gpu is not None
    ratios = []
    for megabytes in (16, 512):
        source = torch.randn(megabytes * 2**20 // 4, device="cuda")
        read = partial(torch.sum, source)
        times: dict[bool, list[float]] = {True: [], False: []}
        for index in range(40):
            hot = index % 2 == 0
            gpu.sleep_us(300)
            gpu.flush()
            if hot:
                read()
            first = gpu.event()
            read()
            second = gpu.event()
            gpu.synchronize()
            times[hot].append(gpu.elapsed_us(first, second))
        ratios.append(statistics.median(times[False]) / statistics.median(times[True]))
    small, large = ratios
    # The flush leaves the cache full of written lines; a large read pays for their way back to memory.
    seen = (
        f"16 MB cold {small:.2f} x hot (at least 1.25), 512 MB {large:.3f} x (within 10 %: the flush's own write-back)"
    )
    return Finding("the flush makes caches cold", small >= 1.25 and abs(large - 1) <= 0.1, seen)


def equal_things_are_equal(bench: Bench) -> Finding:
    """8: A/A comparisons are told apart no more often than chance allows; gives the machine's delta."""
    count = COMPARISONS[bench.machine.device][0]
    found = [_compare(bench, bench.call, bench.call) for _ in range(count)]
    bench.delta, bench.comparisons = delta_from_aa([comparison.effect for comparison in found]), count
    by_interval = sum(comparison.low > 0 or comparison.high < 0 for comparison in found) / count
    by_rule = sum(comparison.verdict in ("faster", "slower") for comparison in found) / count
    limit_interval, limit_rule = (0.05, 0.01) if bench.machine.gpu is not None else (0.25, 0.15)
    seen = (
        f"{count} A/A: {100 * by_interval:.1f} % false by interval (limit {100 * limit_interval:.0f}), "
        f"{100 * by_rule:.1f} % with the floor (limit {100 * limit_rule:.0f}), delta {100 * bench.delta:.2f} %"
    )
    # Two hundred draws at 5 % scatter by 1.5 %; the limit is on what they are drawn from.
    slack = 1.64 * math.sqrt(limit_interval * (1 - limit_interval) / count)
    return Finding("equal things are equal", by_interval <= limit_interval + slack and by_rule <= limit_rule, seen)


def differences_are_found(bench: Bench) -> Finding:
    """9: an injected difference is found, one below the floor is never called one."""
    _, *counts = COMPARISONS[bench.machine.device]
    large, small = INJECTED[bench.machine.device]
    clearly = _slowed(bench, large)
    found = [_compare(bench, bench.call, clearly) for _ in range(counts[0])]
    slightly = _slowed(bench, small)
    called = [_compare(bench, bench.call, slightly, PRECISE) for _ in range(counts[1])]
    power = sum(comparison.verdict == "faster" for comparison in found) / len(found)
    false = sum(comparison.verdict in ("faster", "slower") for comparison in called)
    effect = statistics.median(comparison.effect for comparison in found)
    seen = (
        f"+{100 * large:.0f} % (seen: {100 * effect:+.2f}) found in {100 * power:.0f} % of {len(found)} (at least 95), "
        f"+{100 * small:.1f} % called a difference in {false} of {len(called)}"
    )
    allowed = 0 if bench.machine.gpu is not None else 0.15 * len(called)
    return Finding("differences are found", power >= 0.95 and false <= allowed, seen)


def alarms_fire(bench: Bench) -> Finding:
    """10: throttling, company on the GPU, a wrong backend behind a label, a NaN, a lost profiler record."""
    throttled = [{"held_back_ns": {"power": 0, "thermal": 0}}, {"held_back_ns": {"power": 5, "thermal": 5}}]
    shared = [{"processes": 2, "sm_clock_mhz": 300}]
    alarms = {
        "throttle": telemetry_flags(throttled, None) == {"power_capped", "thermal"},
        "shared GPU, low clock": telemetry_flags(shared, 1980) == {"shared_gpu", "clock_low"},
        "lost record": split_calls([Activity(name, 0, 1.0) for name in ("flush", "a", "flush")], 2).lossy,
        "wrong kernel": _status(bench, f"{__name__}:Mislabelled") == "wrong_kernel",
        "NaN": _status(bench, f"{__name__}:Spoiled") == "inaccurate",
    }
    silent = [name for name, fired in alarms.items() if not fired]
    return Finding(
        "alarms fire", not silent, "silent: " + ", ".join(silent) if silent else f"all {len(alarms)} of them"
    )


class Mislabelled(Flash):
    """Says flash and runs the formula."""

    choice = Math.choice


class Spoiled(Flash):
    """One element of its output is NaN."""

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """As flash, and then it spoils the result."""
        calls = super().prepare(case, inputs)

        def forward() -> torch.Tensor:
            out = calls.forward().clone()
            out[0, 0, 0, 0] = math.nan
            return out

        return replace(calls, forward=forward)


PROOFS: dict[str, tuple[Callable[[Bench], Finding], ...]] = {
    "cuda": (
        sleep_is_linear,
        event_floor_is_known,
        copy_reaches_the_datasheet,
        twice_the_work_takes_twice_as_long,
        timers_agree,
        a_busy_host_does_not_count,
        the_flush_makes_caches_cold,
        equal_things_are_equal,
        differences_are_found,
        alarms_fire,
    ),
    "cpu": (twice_the_work_takes_twice_as_long, equal_things_are_equal, differences_are_found, alarms_fire),
}


def run(device: str) -> int:
    """Run the proofs of a device, a line each; how many failed."""
    try:
        bench = _bench(device)
    except Unavailable as error:
        print(f"FAIL {error}")
        return 1
    broken = []
    for proof in PROOFS[device]:
        number = int((proof.__doc__ or "0").split(":")[0])
        began = time.perf_counter()
        try:
            finding = proof(bench)
        except Exception as error:  # a proof that cannot be led is a failed one, and the others still count
            finding = Finding(proof.__name__.replace("_", " "), False, f"{type(error).__name__}: {error}")
        if not finding.passed:
            broken.append(proof)
        seconds = time.perf_counter() - began
        word = "pass" if finding.passed else "FAIL"
        print(f"{word} {number:>2} {finding.name}: {finding.seen}  [{seconds:.0f} s]", flush=True)
    if equal_things_are_equal in broken or not bench.comparisons:
        print("delta is not kept, since equal things were not found equal")
        return len(broken)
    kept = Calibration(
        device=device_key(bench.machine.environment),
        delta=bench.delta,
        ceilings=bench.machine.ceilings_for("bfloat16" if device == "cuda" else "float32"),
        measured_at=time.time(),
        comparisons=bench.comparisons,
    )
    try:
        print(f"delta {100 * kept.delta:.2f} % and ceilings are kept in {write_calibration(kept)}")
    except OSError as error:
        print(f"delta {100 * kept.delta:.2f} % could not be kept ({error}): set ATTN_EXP_STATE to a folder of yours")
    return len(broken)


def _bench(device: str) -> Bench:
    machine = Machine.open(device)
    machine.ceilings_for("bfloat16" if device == "cuda" else "float32")
    if device == "cuda":
        _, calls = attention(device, batch=8, length=4096)
    else:
        _, calls = attention(device, batch=1, length=128, heads=2, dim=32)
    bench = Bench(machine, calls.forward, calls, 0.0)
    bench.call_us = _median(bench, bench.timer, bench.call)
    return bench


def _median(bench: Bench, timer: str, call: Call) -> float:
    return statistics.median(sample(make_timer(timer, bench.machine.gpu), call, SEVEN).times_us)


def _side_by_side(bench: Bench, *calls: Call, rule: StoppingRule = SEVEN) -> list[list[float]]:
    entries = [Entry(make_timer(bench.timer, bench.machine.gpu), call) for call in calls]
    timings: list[Timing] = sample_rivals(entries, rule, order=abba_order)
    return [round_medians(timing.times_us, timing.rounds) for timing in timings]


def _compare(bench: Bench, one: Call, two: Call, rule: StoppingRule = SEVEN) -> Comparison:
    medians_one, medians_two = _side_by_side(bench, one, two, rule=rule)
    return compare_pair(medians_one, medians_two, bench.delta)


def _slowed(bench: Bench, share: float) -> Call:
    """The bench's call with so much more to do."""
    if bench.machine.gpu is not None:

        def with_sleep(cycles: int) -> None:
            bench.call()
            torch.cuda._sleep(cycles)

        # The launch of a second kernel takes time of its own, which is part of what is added.
        alone, launched = _side_by_side(bench, bench.call, partial(with_sleep, 1))
        overhead_us = statistics.median(launched) - statistics.median(alone)
        return partial(with_sleep, max(1, int((share * bench.call_us - overhead_us) * 1980)))

    def with_spin() -> None:
        bench.call()
        until = time.perf_counter() + share * bench.call_us / 1e6
        while time.perf_counter() < until:
            pass

    return with_spin


def _status(bench: Bench, target: str) -> str:
    device = bench.machine.device
    case, _ = attention(device, batch=1, length=128, heads=2, dim=64)
    timer, also = ("device", ("kernel",)) if device == "cuda" else ("cpu", ())
    measuring = replace(MEASURING, timer=timer, also=also)
    request = Request(
        job="proof", sweep="doctor", model="proof", device=device, case=case,
        backend={"_target_": target, "name": "flash"}, measuring=measuring,
    )  # fmt: skip
    return measure(request, bench.machine).status


def _steps(times: list[float], cycles: list[int]) -> Iterator[tuple[float, float, int, int]]:
    return zip(times, times[1:], cycles, cycles[1:], strict=False)


if __name__ == "__main__":
    try:
        sys.exit(1 if run(sys.argv[1]) else 0)
    except KeyboardInterrupt:
        sys.exit(130)
