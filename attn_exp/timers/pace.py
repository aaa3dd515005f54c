"""The pace of sampling: what `regime=sustained` and `regime=burst` mean for a call that the power limit holds back.

A GPU at rest runs at its highest clock. Under a load that exceeds its power limit it keeps that clock for 0.2 s. Within
another second it falls to a clock that is 16 % lower on an H200 (results/h200/doctor/power_cap.csv). There it swings
about once a second, by 4 %, as long as the load lasts. `sustained` samples that; `burst` samples the first 0.1 s after
a rest. Calls below the limit are sampled at once in both.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

# Puts the device under load for so many seconds, without a rest after it; returns the calls' time in microseconds.
Load = Callable[[float], float]

WINDOW_S = 0.05
# Means of so many windows are compared: 0.2 s.
WINDOWS = 4
# The clock falls for as long as calls get slower by more than this from one mean to the next.
_SLOWER = 0.004
# After so many windows the power is that of the calls; below this share of the limit nothing holds them back.
_POWER_WINDOWS, _BELOW = 3, 0.85
# A swing of the clock under the power limit. In power_cap.csv the medians over 1 s differ by 1 %.
SWING_S = 1.0
# Load that brings the clock back to where it was a moment ago.
AGAIN_S = 0.25
# On an H100 and an H200 the power limit does not act earlier after a rest.
BURST_S = 0.1


@dataclass(frozen=True)
class Pace:
    """How a pass is sampled.

    Attributes:
        least_s: seconds that a single call must be sampled at least.
        rest_s: seconds of rest before a burst; of rivals before each block.
        burst_s: seconds of sampling between two rests.
        settled: whether the clock had settled.
    """

    least_s: float = 0.0
    rest_s: float = 0.0
    burst_s: float = math.inf
    settled: bool = True


def settled(load: Load, limit_s: float, *, was_loaded: bool, draws: Callable[[], float | None]) -> Pace:
    """Load the device until the calls no longer get slower, and return the pace of the following calls.

    After `limit_s` seconds it is given up. The clock is low at once if a load that the power limit held back ended a
    moment ago (`was_loaded`). A call that draws little of the limit's power keeps the highest clock.
    """
    if limit_s <= 0:
        return Pace()
    if was_loaded:
        load(AGAIN_S)
        return Pace(least_s=SWING_S)
    began, logs = time.perf_counter(), list[float]()
    while time.perf_counter() - began < limit_s:
        logs.append(math.log(load(WINDOW_S)))
        if len(logs) == _POWER_WINDOWS and (draws() or 1.0) < _BELOW:
            return Pace()
        if len(logs) < 3 * WINDOWS:
            continue
        before, after = logs[-2 * WINDOWS : -WINDOWS], logs[-WINDOWS:]
        if statistics.fmean(after) - statistics.fmean(before) <= _SLOWER:
            return Pace(least_s=SWING_S)
    return Pace(settled=False)
