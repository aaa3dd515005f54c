"""Compare forwards after the timing with those that were timed.

A forward that is followed by nothing but forwards can leave out what only a backward needs, and do it once backwards
come. Then its own time is too short, and the backward finds what it needs. On a CPU its operators are counted, which a
busy machine does not change, and then it is timed.
"""

import statistics
import time
from collections import Counter
from functools import partial
from typing import Any

from attn_exp.core.text import figures
from attn_exp.timers.timed_call import TimedCall
from attn_exp.worker.attempt import Attempt
from attn_exp.worker.judge.judge import Judge
from attn_exp.worker.judge.one_call import OneCall
from attn_exp.worker.judge.products import more_often, products
from attn_exp.worker.judge.timed_pass import PlainTimes
from attn_exp.worker.stopped import Stopped

# Timed forwards that a GPU makes once more, one by one; on a CPU the CPU time of timed calls is known.
_CALLS = 4
# Forwards are longer if each of several takes more than the timed ones' upper quartile by so much: a factor, beside how
# much slower the device has become, and microseconds by device. So often, with pauses, before it counts.
_LONGER, _MARGIN_US = 1.25, {"cuda": 3.0, "cpu": 50.0}
_REPEATS, _AGAIN, _PAUSE_S = 3, 8, 0.3
# Forwards whose operators are counted if the first one runs more than it should, or fewer: a backend that chooses among
# several ways by chance then chose the same all the time.
_COUNTED_AGAIN = 24


def time_forwards(
    attempt: Attempt, judge: Judge, clock: OneCall, call: TimedCall, counted: Counter[str] | None
) -> None:
    """Note what timed forwards take one by one, and how fast the device is.

    Args:
        attempt: the job.
        judge: keeps it.
        clock: of single calls.
        call: the forward, as the timer makes it.
        counted: its operators, None on a GPU.
    """
    known = judge.passes["forward"]
    with attempt.stage("accuracy"):
        if known.cpu is not None and not clock.on_gpu:
            times_us = list(known.cpu.times_us)
        else:
            times_us = [clock.time_us(call.run, call.before, call.after) for _ in range(_CALLS)]
        known.plain = PlainTimes(times_us, clock.fixed_us(), counted)


def check_forwards(attempt: Attempt, judge: Judge, clock: OneCall, new_us: list[float]) -> None:
    """Compare forwards after the timing of a backward with those that were timed before.

    Args:
        attempt: the job.
        judge: has the timed forwards' times, if there are any.
        clock: of single calls.
        new_us: the times of forwards after the timing.

    Raises:
        Stopped: they take longer.
    """
    forward = judge.passes.get("forward")
    if forward is None or forward.plain is None or not new_us:
        return
    if forward.plain.products is not None:
        with attempt.stage("accuracy"):
            _check_products(judge, forward.plain.products)
        if forward.plain.products:
            # What is counted need not be timed: one of 250 honest jobs on a busy machine seemed to take longer.
            return
    timed_us, margin_us = forward.plain.times_us, _MARGIN_US["cuda" if clock.on_gpu else "cpu"]
    upper_us = statistics.quantiles(timed_us, n=4)[-1] if len(timed_us) > 1 else timed_us[0]
    with attempt.stage("accuracy"):
        for repeat in range(_REPEATS):
            if repeat:
                time.sleep(_PAUSE_S)
                new_us = [clock.forward(judge)[1] for _ in range(_AGAIN)]
            # Each time, because a machine's speed changes.
            slower = max(1.0, clock.fixed_us() / max(1.0, forward.plain.fixed_us)) if min(new_us) > upper_us else 1.0
            if min(new_us) <= _LONGER * slower * upper_us + margin_us:
                return
    reason = (
        f"forward: a forward takes {figures(statistics.median(new_us))} us once backwards were timed, "
        f"{figures(statistics.median(timed_us))} us when it was timed itself: what a backward needs was left out"
    )
    raise Stopped("implausible", reason)


def count_forwards(attempt: Attempt, judge: Judge) -> Counter[str]:
    """Return how often forwards run each operator that computes attention; on a CPU.

    Two are made, of which the second one's result is that of the first but for signs.

    Raises:
        Stopped: the second one runs less, so that it was recognised.
    """
    both: tuple[Counter[str], Counter[str]] | None = None
    with attempt.stage("accuracy"):
        for _ in range(_COUNTED_AGAIN):
            # No calls of the timer's, so that what is drawn stays among those.
            renewals = partial(judge.fresh.renew, every=True), judge.fresh.renew_values
            first, second = (products(TimedCall(judge.forward, renew)) for renew in renewals)
            less = more_often(first, second)
            if less is None or (both is not None and both != (first, second)):
                return first | second
            both = first, second
    reason = (
        f"forward: it runs {less} where its result is not that of the call before but for signs: what is known is not "
        "computed again"
    )
    raise Stopped("implausible", reason)


def _check_products(judge: Judge, before: Counter[str]) -> None:
    """Raise Stopped if every forward that a backward follows runs the same operators, more than when it was timed."""
    more, known = None, None
    for _ in range(_COUNTED_AGAIN):
        made: list[Any] = []
        counted = products(TimedCall(judge.forward, judge.fresh.renew, made.append))
        more = more_often(counted, before)
        if more is None or (known is not None and counted != known):
            return
        known = counted
        judge.backward_of(made[0])()
    reason = (
        f"forward: once backwards were timed a forward runs {more}, as it did when it was timed itself: what a "
        "backward needs was left out"
    )
    raise Stopped("implausible", reason)
