"""The clock of a GPU in bursts: blocks count at the card's highest clock, and it rests for as long as that takes.

A GPU at rest runs at its highest clock. Under a load above its power limit it keeps that clock for 0.1 to 0.2 s, and
falls by up to 16 % within another second (results/h200/doctor/power_cap.csv).
"""

import time
from dataclasses import dataclass

# A block below this share of the highest clock is repeated: clocks have steps of 15 MHz, 0.8 % of 1,980.
COUNTED = 0.99
# Rests between blocks: the shortest one, and by how much they grow with each block below the clock, and shrink.
_SHORTEST_S, _LONGEST_S, _GROWS, _SHRINKS = 0.002, 0.3, 1.5, 0.98
# The rest after a block below the clock, doubled with each further one in a row.
_PAUSE_S = 0.1
# A call that takes longer than this lowers the clock itself: it is one block after this rest, at whatever clock.
LONG_CALL_US, LONG_REST_S = 50_000.0, 0.3


@dataclass
class Card:
    """The rests that keep the highest clock, from one pass to the next.

    The highest clock is that of a call's own blocks: between its kernels a multiprocessor's counter stands still. A
    clock that somebody locked counts as such.

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

    def highest(self, clock_mhz: float, highest_mhz: float) -> float:
        """Return the higher of a block's clock and the highest so far."""
        sound = not self.limit_mhz or clock_mhz <= 1.01 * self.limit_mhz
        return max(highest_mhz, clock_mhz) if sound else highest_mhz

    def counts(self, clock_mhz: float, highest_mhz: float) -> bool:
        """Return whether a block at this mean clock counts, and adapt the rest before the next one."""
        if clock_mhz >= COUNTED * highest_mhz:
            self.rest_s, self._below = _SHRINKS * self.rest_s, 0
            return True
        self.rest_s = min(_LONGEST_S, max(_SHORTEST_S, _GROWS * self.rest_s))
        self._below += 1
        return False

    def give_up(self) -> None:
        """Rest no longer for a call that does not reach the clock."""
        self._below = 0
