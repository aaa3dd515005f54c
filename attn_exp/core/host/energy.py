"""Energy and power while blocks ran, from readings of the device's counter, or of its power.

A GPU's counter moves in steps of tens of milliseconds, and readings see a step late by up to the time between two of
them. Sampled power is the second choice, since a sensor may cover only a quarter of the time on A100 and H100 (Yang,
Adamek and Armour, *Part-time Power Measurements: nvidia-smi's Lack of Attention*, 2023).
"""

import itertools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any


def moment(reading_s: float) -> float:
    """Return when `time.perf_counter()` showed this, in seconds since 1970 and to the microsecond.

    On Linux it is one clock for all processes. It is compared with the time of day once for each process: differences
    of moments are exact even if that is set meanwhile.
    """
    return round(_offset_s() + reading_s, 6)


@cache
def _offset_s() -> float:
    return time.time() - time.perf_counter()


Span = tuple[float, float]

# A stretch of load has to last for so many steps of the counter.
_STEPS = 2.0
# How late a step is seen, relative to the time that is counted: so wrong the power may be.
_RESOLUTION = 0.05
_LEAST_POWERS = 3
_LONGEST_STEP_S = 0.25
# A GPU may exceed its power limit for an instant, but not for a step of its energy counter.
_POWER_FACTOR = 2.0


@dataclass(frozen=True)
class Reading:
    """One reading of the device; `at` is in seconds since 1970.

    `energy_j` counts from an arbitrary zero and was read at `energy_at`. A value is None if the device did not answer.
    """

    at: float
    clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    energy_j: float | None = None
    energy_at: float | None = None
    reasons: tuple[str, ...] | None = None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Reading":
        """Return the reading of decoded fields.

        Raises KeyError if it has no time, TypeError if a field is no number, ValueError if one is not finite.
        """
        names = ("at", "clock_mhz", "memory_clock_mhz", "temperature_c", "power_w", "energy_j", "energy_at")
        numbers = {name: float(fields[name]) for name in names if fields.get(name) is not None}
        if not all(math.isfinite(number) for number in numbers.values()):
            raise ValueError("a reading is not finite")
        at, reasons = numbers.pop("at"), fields.get("reasons")
        return cls(at=at, **numbers, reasons=None if reasons is None else tuple(map(str, reasons)))


@dataclass(frozen=True)
class Energy:
    """Power and energy of some seconds; the fields of `Window`. `broken` and `absent` say why there are none."""

    power_w: float | None = None
    energy_j: float | None = None
    energy_s: float | None = None
    energy_from: str = ""
    power_error: float | None = None
    broken: str = ""
    absent: str = ""


def energy_of(
    stretches: Sequence[Span], readings: Sequence[Reading], inside: Sequence[Reading], limit_w: float | None
) -> Energy:
    """Return the energy of some stretches of load by the counter, or if that does not say by sampled power.

    `inside` are the readings that fell into the stretches; the power limit tells which reading is impossible.
    """
    counted = _counted(stretches, readings, limit_w)
    powers = [one.power_w for one in inside if one.power_w is not None]
    if counted.energy_from:
        return counted
    odd = [power for power in powers if power < 0 or (limit_w and power > _POWER_FACTOR * limit_w)]
    if odd:
        return Energy(broken="; ".join(filter(None, [counted.broken, f"a power of {odd[0]:g} W is impossible"])))
    if len(powers) < _LEAST_POWERS or not statistics.fmean(powers):
        return counted
    seconds, mean = sum(end - begin for begin, end in stretches), statistics.fmean(powers)
    error = 2 * statistics.stdev(powers) / math.sqrt(len(powers)) / mean
    return _made(mean, seconds, "sampled", error, counted.broken)


def _made(power_w: float, seconds: float, source: str, error: float, broken: str = "") -> Energy:
    return Energy(round(power_w, 4), round(power_w * seconds, 6), round(seconds, 6), source, round(error, 5), broken)


def _counted(stretches: Sequence[Span], readings: Sequence[Reading], limit_w: float | None) -> Energy:
    """Return the energy between the first and the last step of the counter that were seen, in the stretches."""
    counts = [
        (reading.energy_at or reading.at, reading.energy_j) for reading in readings if reading.energy_j is not None
    ]
    if not counts:
        return Energy(absent="the device shows no energy")
    for (at, energy), (later, more) in itertools.pairwise(counts):
        if more < energy:
            return Energy(broken="the energy counter went back")
        # Two quick readings may lie around a step, which has the energy of a longer time.
        if limit_w and more - energy > _POWER_FACTOR * limit_w * max(later - at, _LONGEST_STEP_S):
            return Energy(broken=f"the energy counter jumped by {more - energy:,.0f} J in {later - at:.3f} s")
    # When each value was first seen; between two of these the power is taken to be even. Since when the first value
    # was there is not known.
    steps = [now for before, now in itertools.pairwise(counts) if now[1] != before[1]]
    if len(steps) < 3:
        return Energy(absent=f"the energy counter moved {len(steps)} times, which is too few")
    step_s = _usual_gap(steps)
    first, last = steps[0][0], steps[-1][0]
    known = [(max(begin, first), min(end, last)) for begin, end in stretches if min(end, last) > max(begin, first)]
    seconds = sum(end - begin for begin, end in known)
    if not known or seconds / len(known) < _STEPS * step_s:
        each = f"{seconds / len(known):.2g} s" if known else "no time"
        return Energy(absent=f"the energy counter moves every {step_s:.2g} s, and the load lasts for {each} of these")
    error = _usual_gap(counts) * len(known) / seconds
    if error > _RESOLUTION:
        return Energy(absent=f"{seconds:.2g} s of load are too short for a counter that is read to {error:.0%} of them")
    joules = sum(_at(steps, end) - _at(steps, begin) for begin, end in known)
    return _made(joules / seconds, seconds, "counter", error)


def _usual_gap(points: Sequence[tuple[float, float]]) -> float:
    return statistics.median(later[0] - earlier[0] for earlier, later in itertools.pairwise(points))


def _at(steps: Sequence[tuple[float, float]], moment: float) -> float:
    """Return the counter at a moment between its first and last step, by linear interpolation."""
    for (begin, low), (end, high) in itertools.pairwise(steps):
        if begin <= moment <= end:
            return low + (high - low) * (moment - begin) / (end - begin)
    return steps[-1][1]
