"""Compare the first backward of new forwards with the repeated ones that are timed, and look at their gradients.

A training step makes one backward of each forward, and in a model of several layers other forwards lie between the two.
A benchmark repeats the backward of one forward, whose graph may keep what the first one computed. So after the timing
of a backward a few more are timed: of a new forward with other inputs, made and called, and the repeated one beside it.
"""

import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from attn_exp.core.record import FirstBackward
from attn_exp.core.text import figures
from attn_exp.timers.timed_call import Call, TimedCall
from attn_exp.worker.attempt import Attempt, status_of
from attn_exp.worker.judge.below import Below
from attn_exp.worker.judge.forwards import check_forwards
from attn_exp.worker.judge.judge import Judge
from attn_exp.worker.judge.one_call import OneCall
from attn_exp.worker.judge.other_processes import HANDOVER_US, SHARE, check_processes
from attn_exp.worker.judge.pairs import MOST, is_longer, nearly_all_longer
from attn_exp.worker.judge.products import always_more, products
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.stopped import Stopped

# A round is enough for calls of this length by device, two for shorter ones. If first calls seem longer, so many follow
# that it is no accident.
_LONG_US, _ENOUGH = {"cuda": 10_000.0, "cpu": 20_000.0}, 2
# Outputs that are freed and made again, one after the other: at most, at least, and as many as take so long. So many of
# those that lie where an earlier one lay are looked at.
_MOST_OUTPUTS, _LEAST_OUTPUTS, _OUTPUTS_S, _LOOKS = 12, 3, 0.1, 3
# Other forwards between the first new one and its backward: at least two, and as many more as take so long.
_LEAST_BETWEEN, _MOST_BETWEEN, _BETWEEN_US = 2, 16, 10_000.0


def check_first_backward(attempt: Attempt, machine: Machine, judge: Judge, calls: dict[str, Call]) -> dict[int, str]:
    """Time first and repeated backwards in turn, look at their gradients, and record their medians.

    Where the memory does not hold a second graph nothing is compared, and the record says so.

    Args:
        attempt: the job.
        machine: where it runs.
        judge: changes the inputs and makes new forwards.
        calls: has the backward that was timed, and then that or another one, or none.

    Returns:
        What each backward that was looked at is, by the number that the judge gave it.

    Raises:
        Stopped: first backwards take longer than repeated ones, or forwards longer than those that were timed.
    """
    below = Below()
    rounds, below_ns = _Rounds(attempt, machine, judge, calls), below.ns()
    with attempt.stage("accuracy"):
        try:
            rounds.run()
        except Exception as error:  # whatever does not fit
            if status_of(error, "")[0] != "out_of_memory":
                raise
            _record(attempt, FirstBackward(calls=0))
            return rounds.told
    first_us, repeated_us = statistics.median(rounds.of_first), rounds.repeated_us
    _record(attempt, FirstBackward(first_us=first_us, repeated_us=repeated_us, calls=len(rounds.of_first)))
    if rounds.longer:
        reason = (
            f"backward: the first backward of a forward takes {figures(first_us)} us, the repeated ones that were "
            f"timed {figures(repeated_us)} us: what was computed by then was kept"
        )
        raise Stopped("implausible", reason)
    if not rounds.clock.on_gpu:
        below.look()
        if (below.ns() - below_ns) / 1e3 > SHARE * rounds.spent_us + HANDOVER_US * len(rounds.of_forward):
            with attempt.stage("accuracy"):
                check_processes(judge, below, rounds.repeated())
    if not rounds.clock.on_gpu:
        with attempt.stage("accuracy"):
            _check_products(judge)
    check_forwards(attempt, judge, rounds.clock, rounds.of_forward)
    with attempt.stage("accuracy"):
        _look_where_others_lay(judge, rounds.told)
    return rounds.told


def _look_where_others_lay(judge: Judge, told: dict[int, str]) -> None:
    """Look at backwards of new outputs that lie where earlier ones lay, whose backward was called.

    Memory that was freed is given again: what a backward keeps by an address is another output's then. Where the memory
    does not hold a second graph there are none.
    """
    addresses, looks, began = set[int](), 0, time.perf_counter()
    try:
        for number in range(_MOST_OUTPUTS):
            if looks == _LOOKS or (number >= _LEAST_OUTPUTS and time.perf_counter() - began > _OUTPUTS_S):
                return
            judge.fresh.renew(every=True)
            judge.fresh.renew_gradient()
            out = judge.forward()
            gradients = judge.backward_of(out)()
            if out.data_ptr() in addresses:
                told[judge.look(gradients, out)] = "that of a new forward, whose output lies where an earlier one lay,"
                looks += 1
            addresses.add(out.data_ptr())
            del out, gradients
    except Exception as error:  # whatever does not fit
        if status_of(error, "")[0] != "out_of_memory":
            raise


def _check_products(judge: Judge) -> None:
    """Raise Stopped if first backwards of forwards do more than the second ones.

    The times of short calls are too noisy to tell, and one first backward that is short may be so by chance.
    """

    def pair() -> tuple[Counter[str], Counter[str]]:
        judge.fresh.renew()
        call = judge.backward_of(judge.forward())
        return products(TimedCall(call, judge.fresh.renew_gradient)), products(
            TimedCall(call, judge.fresh.renew_gradient)
        )

    if more := always_more(pair):
        raise Stopped(
            "implausible",
            f"backward: the first backward of a forward runs {more} in a repeated one, as those that were timed: what "
            "was computed by then was kept",
        )


def _record(attempt: Attempt, found: FirstBackward) -> None:
    attempt.passes["backward"] = replace(attempt.passes["backward"], first_backward=found)


@dataclass
class _Rounds:
    """Rounds of a new forward, its first backward and the repeated one.

    Attributes:
        attempt: the job.
        machine: where it runs.
        judge: changes the inputs.
        calls: has the backward that was timed.
        of_first: times of first backwards in microseconds.
        of_repeated: those of the repeated one.
        of_forward: those of new forwards.
        told: what each backward that was looked at is, by its number.
    """

    attempt: Attempt
    machine: Machine
    judge: Judge
    calls: dict[str, Call]
    of_first: list[float] = field(default_factory=list)
    of_repeated: list[float] = field(default_factory=list)
    of_forward: list[float] = field(default_factory=list)
    told: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock, self._dice = OneCall(self.attempt, self.machine), random.SystemRandom()
        # On a CPU the timed calls' own CPU time is known: a long call need not be repeated to be compared with.
        cpu = self.judge.passes["backward"].cpu
        self._timed_us = None if cpu is None or self.clock.on_gpu else cpu.quartile_us(1)
        if self._timed_us is not None and self._timed_us <= _LONG_US["cpu"]:
            self._timed_us = None
        written = [one.overwritten for one in self.attempt.judged if one.call == "hard"]
        # Only the newest output of such a backend is one.
        self._overwritten = not written or any(written)

    def run(self) -> None:
        """Make rounds until a first call is as short as a repeated one, or enough of them are longer."""
        while len(self.of_repeated) < MOST and not (self.of_first and self._short()):
            self._round()

    @property
    def spent_us(self) -> float:
        """The CPU time of all calls."""
        return sum(self.of_forward) + sum(self.of_first) + sum(self.of_repeated)

    def repeated(self) -> Call:
        """Return the backward that is repeated; of a new forward, and called once, if that was freed."""
        if "backward" not in self.calls:
            self.calls["backward"] = self.judge.backward()
            self.calls["backward"]()
        return self.calls["backward"]

    @property
    def repeated_us(self) -> float:
        """The median time of the repeated backward."""
        cpu = self.judge.passes["backward"].cpu
        return statistics.median(self.of_repeated or (cpu.times_us if cpu else []))

    @property
    def longer(self) -> bool:
        """Whether first calls take longer in nearly all pairs."""
        all_made = len(self.of_repeated) == MOST
        return all_made and nearly_all_longer(self.of_first, self.of_repeated, self.machine.device)

    def _short(self) -> bool:
        """Whether one of enough first calls is as short as repeated ones."""
        shortest = min(self.of_repeated) if self.of_repeated else self._timed_us
        assert shortest is not None
        enough = 1 if shortest > _LONG_US[self.machine.device] else _ENOUGH
        return len(self.of_first) >= enough and not is_longer(min(self.of_first), shortest, self.machine.device)

    def _round(self) -> None:
        judge, fresh = self.judge, self.judge.fresh
        kinds = [True, False]
        if self._timed_us is not None and not self.of_first:
            # Freed, so that the new forward may get its addresses: what a backward keeps by these is stale then.
            kinds = [True]
            del self.calls["backward"]
        else:
            self.repeated()
        out, forward_us = self.clock.forward(judge)
        self.of_forward.append(forward_us)
        anew = fresh.state
        first = judge.backward_of(out)
        others = 0 if self.of_first else self._others(forward_us)
        # In random order: a busy machine interrupts calls with a rhythm of its own, and the second one of a round finds
        # memory warmer.
        for is_first in self._dice.sample(kinds, len(kinds)):
            fresh.set_forward(anew if is_first else judge.beside)
            call, times = (first, self.of_first) if is_first else (self.calls["backward"], self.of_repeated)
            told = "that of a new forward" if is_first else "the one that was timed"
            told += f", after {others + (not is_first)} other forwards," if others else ""
            looks = is_first or not self._overwritten
            look = partial(self._look, told, out if is_first else None) if looks else _ignore
            times.append(self.clock.time_us(call, fresh.renew_gradient, look))

    def _others(self, forward_us: float) -> int:
        """Make other forwards, as those of a model's other layers, and return how many.

        Where the memory does not hold a third graph there are none.
        """
        if self._overwritten:
            return 0
        count = max(_LEAST_BETWEEN, min(_MOST_BETWEEN, int(_BETWEEN_US / max(1.0, forward_us))))
        try:
            for _ in range(count):
                self.of_forward.append(self.clock.forward(self.judge)[1])
        except Exception as error:  # whatever does not fit
            if status_of(error, "")[0] != "out_of_memory":
                raise
            return 0
        return count

    def _look(self, told: str, out: Any, gradients: Any) -> None:
        self.told[self.judge.look(gradients, out)] = told


def _ignore(result: Any) -> None:
    """Do not look at a result."""
