"""Second opinions: whether the timers of one pass agree, as far as they time the same thing.

In the order `kernel`, `graph` and `device`, `event`, `wall`, each timer adds something around the one before it. These
are gaps between kernels, gaps that the host leaves, the launch and the wait. A timer that is below an earlier one
contradicts it. One that is above contradicts it only where what lies around is known: between `kernel`, `graph` and
`device`, which differ by the gaps between kernels. `dispatch` does not time the work.
"""

import itertools
import math
import statistics
from collections.abc import Sequence

from attn_exp.core.record.limits import UNION_NOTE
from attn_exp.core.record.record import Disagreement, Kernel, Timing
from attn_exp.core.stats.interval import log_half_width
from attn_exp.core.stats.summary import round_medians

_AROUND = {"kernel": 0, "graph": 1, "device": 1, "event": 2, "wall": 3}
_WITHOUT_HOST = 1
# The difference that timers may have whatever their intervals say. `kernel` and `device` differed by more in 8 of 406
# passes on an H200 (results/h200 at b6fbbac9), each under a changing power cap. Another call's clock is percents off.
FLOOR = 0.05
FLOOR_US = 3.0
# On an H200, `device` exceeded the sum of kernels by 3.3 us for one or two kernels, and by 8.1 us for five.
GAP_US = 1.5


def disagreements(timings: Sequence[Timing], kernels: Sequence[Kernel] = ()) -> tuple[Disagreement, ...]:
    """Return the pairs of timers that disagree by more than both of their intervals and the floor.

    Between the `kernels` that a call launches there are gaps.
    """
    known = [timing for timing in timings if timing.timer in _AROUND]
    launches = sum(kernel.count for kernel in kernels)
    pairs = (_disagreement(one, other, launches) for one, other in itertools.combinations(known, 2))
    return tuple(pair for pair in pairs if pair is not None)


def _disagreement(one: Timing, other: Timing, launches: float) -> Disagreement | None:
    inner, outer = sorted((one, other), key=lambda timing: _AROUND[timing.timer])
    inner_us, outer_us = _median(inner), _median(outer)
    # Kernels that run at the same time add up to more than they take.
    least_us = min(inner_us, inner.notes.get(UNION_NOTE, inner_us))
    gaps_us = GAP_US * max(0.0, launches - 1) if inner.timer == "kernel" else 0.0
    most_us = inner_us + gaps_us if _AROUND[outer.timer] == _WITHOUT_HOST else math.inf
    # `device` and `graph` time the same, so that either may be the longer one.
    expected_us = min(max(outer_us, least_us), most_us)
    doubt = _half(inner) + _half(outer)
    if abs(outer_us - expected_us) <= FLOOR_US + FLOOR * expected_us or abs(math.log(outer_us / expected_us)) <= doubt:
        return None
    one_us, other_us = _median(one), _median(other)
    return Disagreement(
        one=one.timer,
        other=other.timer,
        one_us=one_us,
        other_us=other_us,
        low=other_us / one_us * math.exp(-doubt) - 1,
        high=other_us / one_us * math.exp(doubt) - 1,
    )


def _median(timing: Timing) -> float:
    return statistics.median(timing.times_us)


def _half(timing: Timing) -> float:
    """Return the half-width of the median's 95 % interval, logarithmic, across rounds or one block's calls."""
    medians = round_medians(timing.times_us, timing.rounds)
    return log_half_width(medians if len(medians) > 1 else timing.times_us, _median(timing)) or 0.0
