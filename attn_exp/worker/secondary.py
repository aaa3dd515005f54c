"""Second opinions about a pass: one block of calls with each secondary timer."""

import time

from attn_exp.core.record import Timing
from attn_exp.core.request import Request
from attn_exp.timers import make_timer
from attn_exp.timers.graph import CaptureFailed
from attn_exp.timers.kernel import ProfilerLost
from attn_exp.timers.loop import Timer, single_block
from attn_exp.timers.sync import synchronize
from attn_exp.timers.timed_call import Call
from attn_exp.worker.attempt import Attempt
from attn_exp.worker.machine.device import Machine

# What a block takes, and the limits of its calls, which few rounds lower.
_BLOCK_US = 10_000.0
_LEAST_CALLS, _MOST_CALLS = 4, 12


def timer_for(request: Request, name: str, machine: Machine) -> Timer:
    """Return a new timer of this name for a job."""
    return make_timer(name, machine.gpu, request.measuring.l2, request.config.get("timer"))


def secondary_timings(attempt: Attempt, machine: Machine, direction: str, timer: Timer, call: Call) -> list[Timing]:
    """Run one block with each secondary timer. It runs halfway through the rounds, so that clocks match.

    Args:
        attempt: the job, which gets flags where a timer cannot time the call.
        machine: where it runs.
        direction: the pass.
        timer: the one that ranks.
        call: what they time.
    """
    calls = calls_of_block(attempt.request.measuring.min_rounds, _call_us(attempt, machine, direction, call))
    timings = []
    for name in attempt.request.measuring.also:
        if name == "event" and timer.name == "device" and not getattr(timer, "blocked", True):
            continue  # an unblocked device timer measures the same as `event`
        try:
            timings.append(single_block(timer_for(attempt.request, name, machine), call, calls))
        except ProfilerLost:
            attempt.flags.add("profiler_lossy")
        except CaptureFailed:
            attempt.flags.add("no_graph")
    return timings


def calls_of_block(min_rounds: int, call_us: float) -> int:
    """Return how many calls a secondary timer's block has.

    As many as fill the block, and of long ones half of the least number of rounds: what is content with few rounds need
    not be checked by many long calls.
    """
    least = max(2, min(_LEAST_CALLS, min_rounds // 2))
    return max(least, min(_MOST_CALLS, int(_BLOCK_US / call_us)))


def _call_us(attempt: Attempt, machine: Machine, direction: str, call: Call) -> float:
    """Return about how long a call takes: what the trace of its kernels says, or else one call."""
    traced = attempt.passes[direction].activity
    if traced is not None and traced.span_us > 0:
        return traced.span_us
    began = time.perf_counter()
    call()
    synchronize(machine.device)
    return (time.perf_counter() - began) * 1e6
