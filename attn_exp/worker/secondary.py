"""Second opinions about a pass: one block of calls with each secondary timer."""

import time

from attn_exp.core.record.record import Timing
from attn_exp.core.record.request import Request
from attn_exp.timers import make_timer
from attn_exp.timers.call import Call, synchronize
from attn_exp.timers.device import DeviceTimer
from attn_exp.timers.graph import CaptureFailed
from attn_exp.timers.kernel import LONG_US, KernelTimer, ProfilerLost, block_of
from attn_exp.timers.loop import Timer, single_block
from attn_exp.worker.attempt import Attempt
from attn_exp.worker.machine.device import Machine

# The limits of a block's calls, and what it takes between them.
_BLOCK_US = 20_000.0
_LEAST_CALLS, _MOST_CALLS = 3, 50
# The profiler takes its time to read each call's records.
_MOST_TRACED = 12


def timer_for(request: Request, name: str, machine: Machine) -> Timer:
    """Return a new timer of this name for a job."""
    return make_timer(name, machine.gpu, request.measuring.l2, request.config.get("timer"))


def secondary_timings(attempt: Attempt, machine: Machine, direction: str, timer: Timer, call: Call) -> list[Timing]:
    """Run one block with each secondary timer."""
    call_us, timings = _call_us(attempt, machine, direction, call), list[Timing]()
    traced = attempt.traced.get(direction)
    for name in attempt.request.measuring.also:
        if name == "event" and isinstance(timer, DeviceTimer) and not timer.host_bound:
            continue  # the device timer measures the same then
        # The calls that were traced to name the kernels; long ones in a row, which do not rest the GPU.
        if name == "kernel" and traced and (call_us < LONG_US or attempt.request.measuring.regime == "burst"):
            timings.append(block_of(traced, attempt.request.measuring.l2))
            continue
        other = timer_for(attempt.request, name, machine)
        if isinstance(other, KernelTimer):
            other.call_us = call_us
        if machine.card is not None and attempt.request.measuring.regime == "burst":
            machine.card.rest(call_us)
        try:
            timings.append(single_block(other, call, calls_of_block(name, call_us)))
        except ProfilerLost:
            attempt.flags.add("profiler_lossy")
        except CaptureFailed:
            attempt.flags.add("no_graph")
    return timings


def calls_of_block(timer: str, call_us: float) -> int:
    """Return how many calls a secondary timer's block has: as many as fill it, within limits."""
    most = _MOST_TRACED if timer == "kernel" else _MOST_CALLS
    return max(_LEAST_CALLS, min(most, int(_BLOCK_US / call_us)))


def _call_us(attempt: Attempt, machine: Machine, direction: str, call: Call) -> float:
    """Return about how long a call takes: what the trace of its kernels says, or else one call."""
    traced = attempt.passes[direction].activity
    if traced is not None and traced.span_us > 0:
        return traced.span_us
    began = time.perf_counter()
    call()
    synchronize(machine.device)
    return (time.perf_counter() - began) * 1e6
