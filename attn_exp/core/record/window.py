"""The window of a pass: what clock, power and energy were while its blocks ran, from readings beside them.

Everything here is arithmetic on readings; attn_exp/worker/machine/watch.py takes them.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from attn_exp.core.host.energy import Reading, Span, energy_of

# Blocks of one call with a shorter gap between them are one stretch of load: in the gap the host computes. Between two
# blocks of a rival lie those of the others.
_GAP_S, _RIVALS_GAP_S = 0.01, 0.0005
# NVML was seen to need 3 to 16 ms for an answer.
SILENCE_S = 0.25
_CLOCK_FACTOR = 1.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The state of the device while the blocks of one pass ran.

    Attributes:
        source: the origin of the readings: `nvml`, `linux`, or `none`.
        readings: the number of readings inside the blocks.
        seconds: the duration of all blocks together.
        call_share: the share of these in which a timed call ran; the rest is flushes, new inputs and the host.
        clock_mhz: the median clock of the SMs, on a CPU of its cores; None if there was no reading.
        clock_low_mhz: the lowest clock.
        clock_high_mhz: the highest clock.
        memory_clock_mhz: the median clock of the memory.
        temperature_c: the highest temperature.
        power_w: the mean power, flushes and gaps included.
        energy_j: joules counted in `energy_s` seconds of the blocks.
        energy_s: the seconds of the blocks whose energy is known.
        energy_from: `counter`, the driver's count of energy; `sampled`, the mean of sampled power; empty if neither.
        power_error: the largest relative error of `power_w` that the counter's steps allow; for sampled power, two
            standard errors.
        reasons: the share of readings with each reason for a lower clock.
        lost: whether the readings stopped, or cannot be right.
        note: a text on what is missing, and why; empty if nothing is.
    """

    source: str = "none"
    readings: int = 0
    seconds: float = 0.0
    call_share: float = 0.0
    clock_mhz: float | None = None
    clock_low_mhz: float | None = None
    clock_high_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    energy_j: float | None = None
    energy_s: float | None = None
    energy_from: str = ""
    power_error: float | None = None
    reasons: dict[str, float] = field(default_factory=dict)
    lost: bool = False
    note: str = ""


def window_of(
    source: str,
    blocks: Sequence[Span],
    call_s: float,
    readings: Sequence[Reading],
    *,
    watched: Span,
    alone: bool = True,
    trouble: str = "",
    limits: Mapping[str, Any] | None = None,
) -> Window:
    """Return the window of a pass.

    Args:
        source: `nvml` or `linux`.
        blocks: the begin and end of each block of this pass's calls, in time order.
        call_s: seconds in which its timed calls ran.
        readings: the readings in time order, also those before and after the blocks.
        watched: the begin and end of the time in which readings were to come.
        alone: whether no rival's blocks lie between these.
        trouble: earlier trouble with the readings.
        limits: the device's `max_sm_clock_mhz` and `power_limit_w`, to see which reading is impossible.
    """
    limits = limits or {}
    gap_s = _GAP_S if alone else _RIVALS_GAP_S
    stretches = _stretches(blocks, gap_s)
    seconds = sum(end - begin for begin, end in blocks)
    inside = [reading for reading in readings if any(begin <= reading.at <= end + gap_s for begin, end in stretches)]
    troubles = [trouble, _silence(readings, watched) if source == "nvml" and not trouble else ""]
    highest = limits.get("max_sm_clock_mhz")
    most = _CLOCK_FACTOR * highest if highest else math.inf
    usual = [reading for reading in inside if reading.clock_mhz is None or 0 < reading.clock_mhz <= most]
    if len(usual) < len(inside):
        odd = next(reading.clock_mhz for reading in inside if reading not in usual)
        troubles.append(f"a clock of {odd:g} MHz is impossible")
    clocks = [reading.clock_mhz for reading in usual if reading.clock_mhz is not None]
    memory = [reading.memory_clock_mhz for reading in usual if reading.memory_clock_mhz is not None]
    temperatures = [reading.temperature_c for reading in usual if reading.temperature_c is not None]
    reasons = [reading.reasons for reading in inside if reading.reasons is not None]
    window = Window(
        source=source,
        readings=len(inside),
        seconds=round(seconds, 6),
        call_share=round(min(1.0, call_s / seconds), 4) if seconds > 0 else 0.0,
        clock_mhz=statistics.median(clocks) if clocks else None,
        clock_low_mhz=min(clocks, default=None),
        clock_high_mhz=max(clocks, default=None),
        memory_clock_mhz=statistics.median(memory) if memory else None,
        temperature_c=max(temperatures, default=None),
        reasons={
            name: round(sum(name in several for several in reasons) / len(reasons), 4)
            for name in sorted(set[str]().union(*reasons))
        },
    )
    energy = energy_of(stretches, readings, inside, limits.get("power_limit_w"))
    told = [word for word in (*troubles, energy.broken) if word]
    few = [] if inside or told else [f"no reading fell into the pass's {seconds:.2g} s"]
    return replace(
        window,
        **{name: value for name, value in asdict(energy).items() if name not in ("broken", "absent")},
        lost=bool(told),
        note="; ".join(filter(None, [*told, *few, energy.absent if inside else ""])),
    )


def _stretches(blocks: Sequence[Span], gap_s: float) -> list[Span]:
    """Return the blocks with those joined that follow each other at once."""
    joined: list[Span] = []
    for begin, end in blocks:
        if joined and begin - joined[-1][1] <= gap_s:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined


def _silence(readings: Sequence[Reading], watched: Span) -> str:
    """Return for how long no reading came, if that is far longer than one takes."""
    begin, end = watched
    moments = [begin, *(reading.at for reading in readings if begin <= reading.at <= end), end]
    silent_s, since = max((later - earlier, earlier) for earlier, later in itertools.pairwise(moments))
    if silent_s <= SILENCE_S:
        return ""
    return f"no answer for {silent_s:.2f} s, from {since - begin:.2f} s after the first call on"
