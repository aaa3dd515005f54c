"""Find threads of a backend's own on a CPU, or processes, that go on computing when a call has returned.

Whether more threads than PyTorch's compute within a call is not looked for: the kernel adds up a running thread's CPU
time once a tick, milliseconds apart, so that short calls seem to have had dozens of them. Nor are processes that do.
"""

import statistics
import time
from collections.abc import Mapping

import torch

from attn_exp.core.text import figures
from attn_exp.timers.timed_call import Call, TimedCall, as_timed
from attn_exp.worker.attempt import Attempt
from attn_exp.worker.judge.below import Below
from attn_exp.worker.judge.cpu_time import CpuTimes, others_ns
from attn_exp.worker.judge.judge import Judge
from attn_exp.worker.judge.other_processes import HANDOVER_US, SETTLE_S, SHARE
from attn_exp.worker.stopped import Stopped

# In the timed calls: the share of CPU time in other threads that is looked into; after calls, and of processes, less.
_SHARE_IN = 0.05
# What is too much after a call, in six of eight calls; two without end the look.
_LATE_SHARE, _LATE_US, _CLEAN, _MOST, _DIRTY = 0.02, 200.0, 2, 8, 6
_LONGEST_S = 0.25


def check_threads(attempt: Attempt, judge: Judge, calls: Mapping[str, Call]) -> None:
    """Look into the passes whose timed calls had other threads or processes compute.

    With more than one of PyTorch's threads none is looked for, only processes: these threads wait by spinning.

    Args:
        attempt: the job.
        judge: has the CPU time of timed calls; the inputs are left as they are.
        calls: the timed calls of each pass.

    Raises:
        Stopped: others compute after a call has returned.
    """
    state, threads = judge.fresh.state, torch.get_num_threads() == 1
    for direction, known in judge.passes.items():
        if known.cpu is None or not _suspected(known.cpu, threads=threads):
            continue
        with attempt.stage("accuracy"):
            found = _late(as_timed(calls[direction]), known.cpu.below, threads=threads)
            judge.fresh.set_forward(state)
        if found:
            raise Stopped("implausible", f"{direction}: {found}")


def _suspected(cpu: CpuTimes, *, threads: bool) -> bool:
    """Whether other threads than the calling one, or processes, took more than handing work over does."""
    margin_us, total_us = HANDOVER_US * len(cpu.times_us), sum(cpu.times_us)
    in_threads = cpu.others_us > _SHARE_IN * total_us + margin_us or cpu.behind_us > SHARE * total_us + margin_us
    return (threads and in_threads) or cpu.below_us > SHARE * total_us + margin_us


def _late(call: TimedCall, below: Below, *, threads: bool) -> str | None:
    """Return that others go on after calls as a sentence, or None."""
    below.look()
    if below:
        # What a compiler's processes have begun is not the calls' work, and ends.
        below.wait(SETTLE_S, threads=False)

    def others() -> int:
        return below.ns() + (others_ns() if threads else 0)

    late_us: list[float] = []
    own_us: list[float] = []
    while len(own_us) < _MOST and (len(own_us) < _CLEAN or late_us):
        call.before()
        began = time.process_time_ns()
        result = call.run()
        ended, returned = others(), time.process_time_ns()
        below.wait(_LONGEST_S, threads=threads)
        after_us = (others() - ended) / 1e3
        call.after(result)
        del result
        own_us.append((returned - began) / 1e3)
        if after_us > _LATE_SHARE * own_us[-1] + _LATE_US:
            late_us.append(after_us)
        elif len(own_us) - len(late_us) > _MOST - _DIRTY:
            return None
    if len(late_us) < _DIRTY:
        return None
    return (
        f"other threads{' or processes' if below else ''} compute for {figures(statistics.median(late_us))} us after a "
        f"call of {figures(statistics.median(own_us))} us of CPU time has returned: the call does not wait for all of "
        "its work"
    )
