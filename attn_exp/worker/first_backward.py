"""Compare the first backward of new forwards with the repeated ones that are timed.

A training step makes one backward of each forward; a benchmark repeats that of one forward, whose graph may keep what
the first one computed. So after the timing of a backward a few more are timed by the device's plain timer: of a new
forward with other inputs, made and called, and the repeated one beside it.
"""

import random
import statistics
from dataclasses import replace
from functools import partial
from typing import Any

from attn_exp.core.record import FirstBackward, PassRecord
from attn_exp.core.text import figures
from attn_exp.timers import make_timer
from attn_exp.timers.timed_call import Call, TimedCall
from attn_exp.worker.attempt import Attempt, Stopped, status_of
from attn_exp.worker.device import Machine
from attn_exp.worker.judge import Judge

# A first call is longer if it takes more than a repeated one by so much: a factor, and microseconds by device.
_LONGER, _MARGIN_US = 1.1, {"cuda": 3.0, "cpu": 20.0}
# A round is enough for calls of this length by device, two for shorter ones. If first calls seem longer, so many follow
# that it is no accident: of 24 x 24 pairs 92 % are five standard deviations from a half (Mann and Whitney's test).
_LONG_US, _ENOUGH, _MOST, _SHARE = {"cuda": 10_000.0, "cpu": 20_000.0}, 2, 24, 0.92
# The stream is held until the host has enqueued a call.
_HOLD_US, _LONGEST_HOLD_US, _HOLD_FACTOR = 1_000.0, 20_000.0, 1.5


def check_first_backward(attempt: Attempt, machine: Machine, judge: Judge, repeated: Call) -> None:
    """Time first and repeated backwards in turn, and record their medians.

    Where the memory does not hold a second graph nothing is compared, and the record says so.

    Args:
        attempt: the job.
        machine: where it runs.
        judge: changes the inputs and makes new forwards.
        repeated: the backward that was timed.

    Raises:
        Stopped: first backwards take longer than repeated ones.
    """
    clock, dice = _Clock(attempt, machine, judge), random.SystemRandom()
    of_first, of_repeated = list[float](), list[float]()
    beside, measured = judge.fresh.state, attempt.passes["backward"]
    with attempt.stage("accuracy"):
        try:
            while len(of_first) < _MOST and not (of_first and _short(of_first, of_repeated, machine.device)):
                first = judge.new_backward()
                anew = judge.fresh.state
                # In random order: a busy machine interrupts calls with a rhythm of its own, and the second one of a
                # round finds memory warmer.
                for is_first in dice.sample((False, True), 2):
                    judge.fresh.set_forward(anew if is_first else beside)
                    (of_first if is_first else of_repeated).append(clock.time_us(first if is_first else repeated))
                del first
        except Exception as error:  # whatever does not fit
            if status_of(error, "")[0] != "out_of_memory":
                raise
            attempt.passes["backward"] = _with(measured, FirstBackward(calls=0))
            return
    first_us, repeated_us = statistics.median(of_first), statistics.median(of_repeated)
    attempt.passes["backward"] = _with(
        measured, FirstBackward(first_us=first_us, repeated_us=repeated_us, calls=len(of_first))
    )
    if len(of_first) == _MOST and _share_longer(of_first, of_repeated, machine.device) > _SHARE:
        reason = (
            f"backward: the first backward of a forward takes {figures(first_us)} us, the repeated ones that were "
            f"timed {figures(repeated_us)} us: what was computed by then was kept"
        )
        raise Stopped("implausible", reason)


def _with(measured: PassRecord, found: FirstBackward) -> PassRecord:
    return replace(measured, first_backward=found)


def _short(of_first: list[float], of_repeated: list[float], device: str) -> bool:
    """Whether one of enough first calls is as short as repeated ones."""
    shortest = min(of_repeated)
    enough = 1 if shortest > _LONG_US[device] else _ENOUGH
    return len(of_first) >= enough and min(of_first) <= _LONGER * shortest + _MARGIN_US[device]


def _share_longer(of_first: list[float], of_repeated: list[float], device: str) -> float:
    """Return the share of all pairs in which the first call is longer."""
    pairs = [first > _LONGER * again + _MARGIN_US[device] for first in of_first for again in of_repeated]
    return sum(pairs) / len(pairs)


class _Clock:
    """Times single calls, each with a new gradient of the output and flushed caches before it.

    Args:
        attempt: the job, which names the caches' state.
        machine: where it runs.
        judge: changes the gradient.
    """

    def __init__(self, attempt: Attempt, machine: Machine, judge: Judge) -> None:
        self._gpu, self._judge, self._hold_us = machine.gpu, judge, _HOLD_US
        # On a GPU the timer without a blocker: one that repeats a call, because it was not held, would lose the first.
        self._timer = make_timer("cpu" if machine.gpu is None else "event", machine.gpu, attempt.request.measuring.l2)

    def time_us(self, call: Call) -> float:
        """Return the time of one call in microseconds."""
        return self._timer.block(TimedCall(partial(self._run, call), self._before), 1).times_us[0]

    def _before(self) -> None:
        self._judge.fresh.renew_gradient()
        if self._gpu is not None:
            self._gpu.sleep_us(self._hold_us)

    def _run(self, call: Call) -> Any:
        if self._gpu is None:
            return call()
        began = self._gpu.now_us()
        result = call()
        wanted = _HOLD_FACTOR * (self._gpu.now_us() - began)
        self._hold_us = min(_LONGEST_HOLD_US, max(self._hold_us, wanted))
        return result
