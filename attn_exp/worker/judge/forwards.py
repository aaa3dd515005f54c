"""Compare forwards after the timing with those that were timed.

A forward that is followed by nothing but forwards can leave out what only a backward needs, and do it once backwards
come. Then its own time is too short, and the backward finds what it needs. On a CPU its operators are counted, which a
busy machine does not change, and then it is timed.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from attn_exp.core.text import figures
from attn_exp.timers.timed_call import TimedCall
from attn_exp.worker.attempt import Attempt, status_of
from attn_exp.worker.judge.judge import Judge
from attn_exp.worker.judge.one_call import OneCall
from attn_exp.worker.judge.products import always_more, more_work, products
from attn_exp.worker.judge.timed_pass import PlainTimes
from attn_exp.worker.stopped import Stopped

# Timed forwards that a GPU makes once more, one by one; on a CPU the CPU time of timed calls is known.
_CALLS = 4
# Forwards are longer if each of several takes more than the timed ones' upper quartile by so much: a factor, beside how
# much slower the device has become, and microseconds by device. So often, with pauses, before it counts.
_LONGER, _MARGIN_US = 1.25, {"cuda": 3.0, "cpu": 50.0}
_REPEATS, _AGAIN, _PAUSE_S = 3, 8, 0.3
# Forwards whose work is counted if the first one does more than it should: a backend that chooses among several ways by
# chance chooses the least of them once in so many.
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
    """Return how much forwards do of each operator that computes attention; on a CPU.

    Of two the second one's result is that of the first but for signs. Of two others the first one's inputs are other
    numbers altogether, not those of the call before with other signs.

    Raises:
        Stopped: one does less, so that its inputs were recognised.
    """
    seen: list[Counter[str]] = []

    def counted(renew: Callable[[], None]) -> Counter[str]:
        return products(TimedCall(judge.forward, renew))

    def alike() -> tuple[Counter[str], Counter[str]]:
        both = counted(partial(judge.fresh.renew, every=True)), counted(judge.fresh.renew_values)
        seen.extend(both)
        return both

    def unlike() -> tuple[Counter[str], Counter[str]]:
        with judge.fresh.other_numbers():
            return counted(lambda: None), counted(judge.fresh.renew)

    with attempt.stage("accuracy"):
        less, known = always_more(alike), None
        if less is None and judge.fresh.has_normal_numbers:
            known = always_more(unlike)
    if less:
        raise Stopped(
            "implausible",
            f"forward: it runs {less} where its result is not that of the call before but for signs: what is known is "
            "not computed again",
        )
    if known:
        raise Stopped(
            "implausible",
            f"forward: it runs {known} where its inputs are not those of the call before with other signs: what is "
            "known of these is not computed again",
        )
    return seen[0] | seen[1]


def _check_products(judge: Judge, before: Counter[str]) -> None:
    """Raise Stopped if every forward that a backward follows does more than when it was timed.

    An earlier output is alive, as in a model: what its backward needs could be computed in the next forward.
    """
    more, earlier = None, [judge.forward()]
    for _ in range(_COUNTED_AGAIN):
        made: list[Any] = []
        try:
            counted = products(TimedCall(judge.forward, judge.fresh.renew, made.append))
        except Exception as error:  # whatever does not fit
            if not earlier or status_of(error, "")[0] != "out_of_memory":
                raise
            # The memory does not hold a second graph.
            earlier.clear()
            continue
        more = more_work(counted, before)
        if more is None:
            return
        judge.backward_of(made[0])()
        earlier = earlier and made
    reason = (
        f"forward: once backwards were timed a forward runs {more}, as it did when it was timed itself: what a "
        "backward needs was left out"
    )
    raise Stopped("implausible", reason)
