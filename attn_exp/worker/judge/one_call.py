"""The plain time of single calls, by which calls of different phases of a job are compared."""

from collections.abc import Callable
from functools import partial
from time import process_time_ns
from typing import Any

import torch

from attn_exp.timers import make_timer
from attn_exp.timers.timed_call import Call, TimedCall
from attn_exp.worker.attempt import Attempt
from attn_exp.worker.judge.judge import Judge
from attn_exp.worker.machine.device import Machine

# The stream is held until the host has enqueued a call.
_HOLD_US, _LONGEST_HOLD_US, _HOLD_FACTOR = 400.0, 20_000.0, 1.5
# The size of matrices by device, of which a few products say how fast the device is at the moment.
_FIXED, _FIXED_CALLS = {"cuda": 1024, "cpu": 256}, 3


class OneCall:
    """Times single calls with flushed caches: on a GPU between events, on a CPU the process's CPU time.

    Wall time on a CPU is that of other programs, too.

    Args:
        attempt: the job, which names the caches' state.
        machine: where it runs.
    """

    def __init__(self, attempt: Attempt, machine: Machine) -> None:
        self._gpu, self._device, self._hold_us = machine.gpu, machine.device, _HOLD_US
        # The timer without a blocker: one that repeats a call, because it was not held, would lose the first.
        l2 = attempt.request.measuring.l2
        self._timer = None if machine.gpu is None else make_timer("event", machine.gpu, l2)

    @property
    def on_gpu(self) -> bool:
        """Whether calls are timed between events."""
        return self._gpu is not None

    def forward(self, judge: Judge) -> tuple[Any, float]:
        """Return the output of a forward on new inputs, and its time in microseconds."""
        made: list[Any] = []
        time_us = self.time_us(judge.forward, judge.fresh.renew, made.append)
        return made[0], time_us

    def time_us(
        self, call: Call, before: Callable[[], None] = lambda: None, after: Callable[[Any], None] = lambda result: None
    ) -> float:
        """Return the time of one call in microseconds, with what comes before and after it untimed."""
        if self._gpu is None or self._timer is None:
            before()
            began = process_time_ns()
            result = call()
            spent_us = (process_time_ns() - began) / 1e3
            after(result)
            return spent_us
        gpu = self._gpu

        def held() -> None:
            before()
            gpu.sleep_us(self._hold_us)

        return self._timer.block(TimedCall(partial(self._run, call), held, after), 1).times_us[0]

    def _run(self, call: Call) -> Any:
        assert self._gpu is not None
        began = self._gpu.now_us()
        result = call()
        wanted = _HOLD_FACTOR * (self._gpu.now_us() - began)
        self._hold_us = min(_LONGEST_HOLD_US, max(self._hold_us, wanted))
        return result

    def fixed_us(self) -> float:
        """Return the time of fixed work, the shortest of a few times: it says how fast the device is now."""
        one = torch.ones(2 * (_FIXED[self._device],), device=self._device)
        return min(self.time_us(lambda: torch.softmax(one @ one, -1) @ one) for _ in range(_FIXED_CALLS))
