"""What a mask takes to build: time and memory, apart from the calls that use it."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from attn_exp.timers.sync import seconds
from attn_exp.worker.attempt import Attempt, status_of
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.machine.memory import call_memory

# Several times, since the first one loads kernels; building the largest takes seconds, and then two are enough.
_LEAST, _MOST, _BUDGET_S = 2, 8, 0.2


def measure_mask(attempt: Attempt, machine: Machine, build: Callable[[], object]) -> None:
    """Build the mask's data again and again, and keep the median time and the peak of the memory.

    A model whose mask changes from batch to batch pays this beside the attention. Where the memory does not hold
    another mask beside the one that is timed, it is not known.
    """
    times: list[float] = []
    try:
        with attempt.stage("mask"):
            memory = None if machine.memory is None else call_memory(machine.memory, build).peak
            began = time.perf_counter()
            while len(times) < _LEAST or (len(times) < _MOST and time.perf_counter() - began < _BUDGET_S):
                times.append(seconds(machine.device, build))
    except Exception as error:  # whatever does not fit
        if status_of(error, "")[0] != "out_of_memory":
            raise
        return
    direction = attempt.request.measuring.passes[0]
    attempt.passes[direction] = replace(
        attempt.passes[direction], mask_build_us=statistics.median(times[1:]) * 1e6, mask_build_bytes=memory
    )
