"""Flags: what a reader should know about a valid number. Each has the mark that tables show."""

import os
import statistics
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_exp.core.host.cpu_reader import THROTTLED
from attn_exp.core.record.record import Timing
from attn_exp.core.record.window import Window
from attn_exp.core.stats.interval import log_half_width
from attn_exp.core.stats.summary import round_medians

# /proc/stat counts in ticks of 10 ms for each processor.
_SLACK_S = 0.03


def host_reading() -> dict[str, Any]:
    """Return the CPU seconds that this host's processors were busy (or a hypervisor took), and that this process used.

    Empty if Linux' /proc cannot be read.
    """
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return {}
    user, nice, system, _, _, irq, softirq, steal = (int(ticks) for ticks in fields[:8])
    busy = user + nice + system + irq + softirq + steal
    return {"at": time.time(), "busy_s": busy / os.sysconf("SC_CLK_TCK"), "own_s": time.process_time()}


def others_cores(first: Mapping[str, Any], last: Mapping[str, Any]) -> float:
    """Return how many processors other programs kept busy between two readings; 0.0 if unknown."""
    if "busy_s" not in first or "busy_s" not in last or last["at"] <= first["at"]:
        return 0.0
    others_s = (last["busy_s"] - first["busy_s"]) - (last["own_s"] - first["own_s"]) - _SLACK_S
    return float(max(0.0, others_s / (last["at"] - first["at"])))


# flag: (mark in tables, meaning). Those that make a number hard to repeat have a mark; the others are in table.csv and
# in `attn-exp explain`.
FLAGS = {
    "unstable": ("~", "the 95 % interval is wider than +-2 %"),
    "below_clock": ("c", "most blocks were more than 1 % below the highest clock that the call had"),
    "low_duty": ("r", "the GPU rested for more than 5 % of a stretch under load: in a loop the call is slower"),
    "drift": ("", "the last third of the rounds differs from the first by more than 1 %"),
    "too_short": ("", "the median is below 10 us or 50 steps of the GPU's events, near what they can resolve"),
    "launch_bound": ("", "issuing the call takes longer than running it: without a CUDA graph users see more"),
    "unblocked": ("", "the stream could not be held back while the host enqueued: host gaps may be inside"),
    "power_capped": ("", "the power cap lowered the clock while measuring (information, not an error)"),
    "thermal": ("T", "the GPU or the processor slowed down because of its temperature"),
    "clock_low": ("", "the SM clock was below 75 % of the highest: locked, or idling between calls"),
    "clock_jump": ("", "the clock was more than 8 % off its median at some time while the calls were timed"),
    "telemetry_lost": ("", "clock, power or energy stopped being read while calls were timed, or cannot be right"),
    "apart": ("a", "measured alone, apart from the case's other rows"),
    "shared_gpu": ("s", "another process computes on the GPU"),
    "busy_host": ("b", "other programs used the processors while they were measured"),
    "timers_disagree": ("d", "two timers of a pass differ by more than their intervals and what they time differently"),
    "profiler_lossy": ("", "the profiler lost kernel records: the kernels are known, but not which call ran which"),
    "outside_memory": ("", "more than 256 MiB, and a tenth of the peak, were taken outside of PyTorch's allocator"),
    "no_graph": ("", "the call cannot be captured into a CUDA graph"),
}

# Interference flags: they last longer than a round, can make equal backends look different, and no test on the samples
# detects them.
INTERFERENCE = frozenset({"busy_host", "shared_gpu"})


def shown_flags(flags: Iterable[str]) -> list[str]:
    """Return those of the flags that tables mark: they make a number hard to repeat."""
    return [flag for flag in flags if FLAGS.get(flag, ("",))[0]]


def flags_in(flags: Sequence[str], of_passes: Mapping[str, Collection[str]], direction: str) -> tuple[str, ...]:
    """Return the flags of a job without those that only another pass has."""
    elsewhere = {flag for own in of_passes.values() for flag in own} - set(of_passes.get(direction, ()))
    return tuple(flag for flag in flags if flag not in elsewhere)


# The half-width of an interval above which a time is `unstable`.
STABLE = 0.02
# If an unblocked call takes this many times as long, the host cannot keep up.
LAUNCH_BOUND = 1.05
_OTHERS_CORES = 0.1
# Under a power cap an H200's clock stays within 4 % of its median once it has settled, and is 10 % off it before
# (results/h200/doctor/power_cap.csv).
_CLOCK_JUMP = 0.08
_DRIFT, _CLOCK = 0.01, 0.75
_DUTY = 0.95
_SHORT_US, _SHORT_QUANTA = 10.0, 50.0
# Timers whose samples last long however short a call is.
_OF_MANY_CALLS = ("cpu", "benchmark")
# A GPU's by NVML, a processor's by Linux (core/host/cpu_reader.py).
_HOT = frozenset({"sw_thermal", "hw_thermal", "hw_slowdown", THROTTLED})
_CAPPED = frozenset({"sw_power_cap", "hw_power_brake"})


def timing_flags(ranking: Timing, others: tuple[Timing, ...], quantum_us: float = 0.0) -> set[str]:
    """Return the flags that follow from the samples of the ranking and secondary timers.

    `quantum_us` is the step of this GPU's event times, in microseconds.
    """
    flags = set(ranking.flags).union(*(other.flags for other in others))
    medians = round_medians(ranking.times_us, ranking.rounds)
    median = statistics.median(ranking.times_us)
    half = log_half_width(medians, median)
    if half is not None and half > STABLE:
        flags.add("unstable")
    third = len(medians) // 3
    if third and abs(statistics.median(medians[-third:]) / statistics.median(medians[:third]) - 1) > _DRIFT:
        flags.add("drift")
    if ranking.timer not in _OF_MANY_CALLS and median < max(_SHORT_US, _SHORT_QUANTA * quantum_us):
        flags.add("too_short")
    events = [other for other in others if other.timer == "event" and ranking.timer == "device"]
    if any(statistics.median(event.times_us) / median > LAUNCH_BOUND for event in events):
        flags.add("launch_bound")
    return flags


def duty_flags(timing: Timing) -> set[str]:
    """Return the flag of a heavy call for which the GPU rested between blocks."""
    return {"low_duty"} if timing.notes.get("duty", 1.0) < _DUTY else set()


def flag_marks(flags: Iterable[str]) -> str:
    """Return the marks of flags, in their order."""
    return "".join(FLAGS[flag][0] for flag in flags if flag in FLAGS)


def flag_notes(flags: Iterable[str]) -> list[str]:
    """Return a line for each marked flag that occurs: its mark, name and meaning."""
    return [f"{FLAGS[flag][0]} {flag}: {FLAGS[flag][1]}" for flag in sorted({*shown_flags(flags)})]


def telemetry_flags(readings: Sequence[dict[str, Any]], highest_clock_mhz: float | None) -> set[str]:
    """Return the flags that follow from NVML's readings, or on a CPU Linux', before, between and after the passes."""
    flags = set()
    if readings and others_cores(readings[0], readings[-1]) > _OTHERS_CORES:
        flags.add("busy_host")
    for cause, flag in (("power", "power_capped"), ("thermal", "thermal")):
        held = [reading["held_back_ns"][cause] for reading in readings if cause in reading.get("held_back_ns", ())]
        if len(held) > 1 and held[-1] > held[0]:
            flags.add(flag)
    for reading in readings:
        if _HOT & set(reading.get("reasons", ())):
            flags.add("thermal")
        if highest_clock_mhz and reading.get("sm_clock_mhz", highest_clock_mhz) < _CLOCK * highest_clock_mhz:
            flags.add("clock_low")
        if reading.get("processes", 0) > 1:
            flags.add("shared_gpu")
    return flags


def window_flags(window: Window, highest_clock_mhz: float | None) -> set[str]:
    """Return the flags that follow from what the device did while the calls of a pass were timed."""
    flags = {"telemetry_lost"} if window.lost else set[str]()
    for flag, reasons in (("power_capped", _CAPPED), ("thermal", _HOT)):
        if reasons & {reason for reason, share in window.reasons.items() if share > 0}:
            flags.add(flag)
    if window.clock_mhz is None or window.clock_low_mhz is None or window.clock_high_mhz is None:
        return flags
    low, high = window.clock_low_mhz / window.clock_mhz, window.clock_high_mhz / window.clock_mhz
    if max(1 - low, high - 1) > _CLOCK_JUMP:
        flags.add("clock_jump")
    if highest_clock_mhz and window.clock_mhz < _CLOCK * highest_clock_mhz:
        flags.add("clock_low")
    return flags
