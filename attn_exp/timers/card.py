"""The rests of a GPU in bursts: as short as keeps the clock at which the call runs on a rested card.

A GPU at rest runs at its highest clock. Under a load above its power limit it keeps that for 0.1 to 0.2 s, and falls by
up to 16 % within another second (results/h200/doctor/power_cap.csv). The clock is that of a call's own blocks: stamps
on the GPU show that heavy calls run at lower clocks from their first millisecond on than light ones, where NVML says
1,980 MHz of both.
"""

import time
from dataclasses import dataclass

# A block below this share of its call's highest clock does not count: the clock has steps of 15 MHz, 0.8 % of 1,830.
COUNTED = 0.99
# Rests between blocks: the shortest and the longest, and by how much they grow with each block below the clock, and
# shrink with each other one.
_SHORTEST_S, _LONGEST_S, _GROWS, _SHRINKS = 0.002, 0.1, 1.3, 0.97
# The rest after a block below the clock, doubled with each further one in a row.
_PAUSE_S = 0.05
# A call that takes longer than this lowers the clock itself: it is one block after this rest, at whatever clock.
LONG_CALL_US, LONG_REST_S = 50_000.0, 0.3


@dataclass
class Card:
    """The rests that keep the clock, from one pass to the next.

    Attributes:
        rest_s: seconds of rest before a block.
        limit_mhz: the highest clock that this GPU can have; a block above it has no sound stamps. 0 if unknown.
    """

    rest_s: float = 0.0
    limit_mhz: float = 0.0
    _below: int = 0

    def rest(self, call_us: float) -> None:
        """Rest before a block of a call."""
        seconds = LONG_REST_S if call_us > LONG_CALL_US else self.rest_s
        seconds += _PAUSE_S * 2 ** (self._below - 1) if self._below else 0.0
        if seconds >= _SHORTEST_S:
            time.sleep(seconds)

    def sound(self, clock_mhz: float) -> bool:
        """Return whether a clock is possible."""
        return not self.limit_mhz or clock_mhz <= 1.01 * self.limit_mhz

    def adapt(self, counts: bool) -> None:
        """Adapt the rest before the next block to whether one was at the clock."""
        if counts:
            self.rest_s, self._below = _SHRINKS * self.rest_s, 0
        else:
            self.rest_s = min(_LONGEST_S, max(2 * _SHORTEST_S, _GROWS * self.rest_s))
            self._below += 1

    def give_up(self) -> None:
        """Rest no longer for a call that does not reach the clock."""
        self._below = 0
