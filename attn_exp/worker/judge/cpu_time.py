"""The CPU time of timed calls on a CPU, which other programs on the machine do not lengthen as they do wall time."""

import statistics
from dataclasses import dataclass, field
from time import process_time_ns, thread_time_ns

from attn_exp.worker.judge.below import Below

# With fewer calls there are no quartiles.
_LEAST_CALLS = 2


@dataclass
class CpuTimes:
    """The CPU time of the process in each timed call, of all threads.

    Attributes:
        times_us: in microseconds, in the calls' order.
        others_us: the CPU time that other threads than the calling one took in calls.
        behind_us: that which they took between two calls, from the end of one to the begin of the next.
        below_us: that of processes below this one, in calls and between them.
    """

    times_us: list[float] = field(default_factory=list)
    others_us: float = 0.0
    behind_us: float = 0.0
    below_us: float = 0.0
    below: Below = field(default_factory=Below)
    _below_ns: int = 0
    _process_ns: int = 0
    _others_ns: int = 0
    _ended: bool = False

    def clear(self) -> None:
        """Forget the calls so far."""
        self.times_us.clear()
        self.others_us = self.behind_us = self.below_us = 0.0
        self._ended = False
        self.below.look()
        self._below_ns = self.below.ns()

    def begin(self) -> None:
        """Note the clocks right before a call."""
        before, self._others_ns = self._others_ns, others_ns()
        if self._ended:
            self.behind_us += (self._others_ns - before) / 1e3
        self._process_ns = process_time_ns()

    def end(self) -> None:
        """Add the call that has just returned."""
        process_ns = process_time_ns()
        before, self._others_ns = self._others_ns, others_ns()
        self.times_us.append((process_ns - self._process_ns) / 1e3)
        self.others_us += (self._others_ns - before) / 1e3
        self.below_us = (self.below.ns() - self._below_ns) / 1e3
        self._ended = True

    def quartile_us(self, quarter: int) -> float | None:
        """Return the lower (1) or upper (3) quartile of the times, None of fewer than two calls."""
        if len(self.times_us) < _LEAST_CALLS:
            return None
        return statistics.quantiles(self.times_us, n=4)[quarter - 1]


def others_ns() -> int:
    """Return the CPU time of all threads of this process but the calling one, in nanoseconds."""
    return process_time_ns() - thread_time_ns()
