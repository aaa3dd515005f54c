"""Before sampling: load until the GPU's clock has settled, as `regime=sustained` says.

A GPU at rest runs at its highest clock. Under a load that exceeds its power limit it goes on so for 0.2 s, and falls
for another second to a clock that is 16 % lower on an H200 (results/h200/doctor/power_cap.csv). There it swings about
once a second, by 4 %, as long as the load lasts: only what is sampled for whole swings is the sustained time. A load
below the limit leaves the clock at its highest, where it returns to after a heavier load.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# What `Settling` calls to put the device under load for so many seconds: it returns the calls' time in microseconds.
Load = Callable[[float], float]

WINDOW_S = 0.05
# Two means of as many windows are compared, so that a GPU is under load for 1.2 s at least: the power limit acts on an
# average over a second.
WINDOWS = 12
# What they may differ by: a little, or more where that is how windows scatter.
_SAME, _SCATTER, _MOST = 0.005, 3.0, 0.025
# Two swings of the clock under the power limit. In power_cap.csv the medians over 0.5 s differ by 4 %, over 1 s by 1 %,
# over 2 s by less than 0.1 %.
SWINGS_S = 2.0
# A clock nearer to the highest than this is at it. A step of an H200's clock is 0.8 %.
_HIGHEST, _STEP = 0.97, 0.01
_SAME_CLOCKS = 3


@dataclass(frozen=True)
class Settling:
    """Puts a GPU under the load of what will be timed, until the clock has settled.

    Attributes:
        limit_s: seconds after which it is given up.
        heavy: whether the power limit may be below what the load takes.
        read: what NVML reports now; empty without it.
        highest_mhz: the highest SM clock; None if it is not known.
    """

    limit_s: float
    heavy: bool
    read: Callable[[], Sequence[Mapping[str, Any]]]
    highest_mhz: float | None = None

    def settle(self, load: Load) -> float | None:
        """Load the GPU until its clock has settled.

        Returns:
            The seconds that sampling must last at least for the sustained time; None if the clock has not settled.
        """
        began = time.perf_counter()
        settled = self._heavy(load, began) if self.heavy else self._light(load, began)
        if not settled:
            return None
        return SWINGS_S if self.heavy and not self._at_highest(self._clock()) else 0.0

    def _clock(self) -> float | None:
        """Return the SM clock of now in MHz, None if it is not known."""
        return next((float(one["sm_clock_mhz"]) for one in self.read() if "sm_clock_mhz" in one), None)

    def _at_highest(self, clock: float | None) -> bool:
        return clock is not None and self.highest_mhz is not None and clock >= _HIGHEST * self.highest_mhz

    def _over(self, began: float) -> bool:
        return time.perf_counter() - began >= self.limit_s

    def _heavy(self, load: Load, began: float) -> bool:
        logs: list[float] = []
        while not self._over(began):
            logs.append(math.log(load(WINDOW_S)))
            if len(logs) >= 2 * WINDOWS and _same(logs[-2 * WINDOWS : -WINDOWS], logs[-WINDOWS:]):
                return True
        return False

    def _light(self, load: Load, began: float) -> bool:
        """Wait for a clock that is below the highest to stay where it is."""
        clocks: list[float] = []
        while True:
            clock = self._clock()
            if clock is None or self.highest_mhz is None or self._at_highest(clock):
                return True
            clocks = [*clocks, clock][-_SAME_CLOCKS:]
            if len(clocks) == _SAME_CLOCKS and max(clocks) <= (1 + _STEP) * min(clocks):
                return True
            if self._over(began):
                return False
            load(WINDOW_S)


def _same(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether two series of log times have one mean, as far as the scatter of the later one tells."""
    scatter = statistics.stdev(after) * math.sqrt(2 / len(after))
    allowed = max(_SAME, min(_MOST, _SCATTER * scatter))
    return abs(statistics.fmean(after) - statistics.fmean(before)) <= allowed
