"""Find processes of a backend's own that compute for the first backward of a forward what repeated ones get.

The CPU time of this process does not show it. Nor do single calls, since a process may compute between them, or while
another one is made: so a forward and its backward are taken together.
"""

from collections.abc import Callable
from random import SystemRandom
from statistics import median
from time import process_time_ns

from attn_exp.core.text import figures
from attn_exp.timers.timed_call import Call
from attn_exp.worker.judge.below import Below
from attn_exp.worker.judge.judge import Judge
from attn_exp.worker.judge.pairs import MOST, is_longer, nearly_all_longer
from attn_exp.worker.stopped import Stopped

# The share of CPU time in other processes that is looked into, beside microseconds a call for handing work over.
SHARE, HANDOVER_US = 0.02, 50.0
# So long is waited for others that have begun something, as compilers' processes do, and for the work of one call.
SETTLE_S, _CALL_S = 20.0, 0.25
# Pairs that are made at least.
_ENOUGH = 2


def check_processes(judge: Judge, below: Below, repeated: Call) -> None:
    """Compare new forwards and their backwards with new forwards and the repeated backward, by all CPU time.

    Args:
        judge: makes forwards; the inputs are left as one of these had them.
        below: the processes.
        repeated: the backward that was timed.

    Raises:
        Stopped: new ones take longer in nearly all pairs.
    """
    fresh = judge.fresh
    below.look()
    below.wait(SETTLE_S, threads=False)

    def first() -> None:
        fresh.renew()
        judge.backward_of(judge.forward())()

    def again() -> None:
        fresh.renew()
        # Its graph is gone at once: nobody is to work for its backward.
        judge.forward()
        fresh.set_forward(judge.beside)
        repeated()

    times_us: dict[bool, list[float]] = {True: [], False: []}
    while len(times_us[True]) < MOST:
        if len(times_us[True]) >= _ENOUGH and not is_longer(min(times_us[True]), min(times_us[False]), "cpu"):
            return
        for is_first in SystemRandom().sample((True, False), 2):
            times_us[is_first].append(_spent_us(below, first if is_first else again))
    if nearly_all_longer(times_us[True], times_us[False], "cpu"):
        new_us, timed_us = (figures(median(times_us[which])) for which in (True, False))
        reason = (
            f"backward: with the CPU time of other processes a forward and its first backward take {new_us} us, a "
            f"forward and the backward that was timed {timed_us} us: what was computed by then was kept"
        )
        raise Stopped("implausible", reason)


def _spent_us(below: Below, call: Callable[[], None]) -> float:
    """Return the CPU time of a call in this process and in others, until these are quiet, in microseconds."""
    own, others = process_time_ns(), below.ns()
    call()
    own = process_time_ns() - own
    below.wait(_CALL_S, threads=False)
    return (own + below.ns() - others) / 1e3
