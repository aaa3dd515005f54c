"""Find threads of a backend's own on a CPU that go on computing when a call has returned.

Whether more threads than PyTorch's compute within a call is not looked for: the kernel adds up a running thread's CPU
time once a tick, milliseconds apart, so that short calls seem to have had dozens of them.
"""

import contextlib
import statistics
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from attn_exp.core.text import figures
from attn_exp.timers.timed_call import Call, TimedCall, as_timed
from attn_exp.worker.attempt import Attempt
from attn_exp.worker.judge.cpu_time import CpuTimes, others_ns
from attn_exp.worker.judge.judge import Judge
from attn_exp.worker.stopped import Stopped

_TASKS = Path("/proc/self/task")
# In the timed calls: the share of CPU time in other threads, and of the call's time after it, that are looked into,
# beside microseconds a call for handing work over.
_SHARE_IN, _SHARE_AFTER, _HANDOVER_US = 0.05, 0.02, 50.0
# What is too much after a call, in six of eight calls; two without end the look.
_LATE_SHARE, _LATE_US, _CLEAN, _MOST, _DIRTY = 0.02, 200.0, 2, 8, 6
# Others have ended their work if none runs, or waits for a processor, in two looks a few milliseconds apart.
_LOOK_S, _LONGEST_S = 0.002, 0.25


def check_threads(attempt: Attempt, judge: Judge, calls: Mapping[str, Call]) -> None:
    """Look into the passes whose timed calls had other threads compute.

    With more than one of PyTorch's threads nothing is looked for: these threads wait by spinning.

    Args:
        attempt: the job.
        judge: has the CPU time of timed calls; the inputs are left as they are.
        calls: the timed calls of each pass.

    Raises:
        Stopped: threads compute after a call has returned.
    """
    if torch.get_num_threads() > 1:
        return
    state = judge.fresh.state
    for direction, known in judge.passes.items():
        if known.cpu is None or not _suspected(known.cpu):
            continue
        with attempt.stage("accuracy"):
            found = _late(as_timed(calls[direction]))
            judge.fresh.set_forward(state)
        if found:
            raise Stopped("implausible", f"{direction}: {found}")


def _suspected(cpu: CpuTimes) -> bool:
    """Whether other threads than the calling one took more than handing work over does."""
    margin_us = _HANDOVER_US * len(cpu.times_us)
    return (
        cpu.others_us > _SHARE_IN * sum(cpu.times_us) + margin_us
        or cpu.behind_us > _SHARE_AFTER * sum(cpu.times_us) + margin_us
    )


def _late(call: TimedCall) -> str | None:
    """Return that other threads go on after calls as a sentence, or None."""
    late_us: list[float] = []
    own_us: list[float] = []
    while len(own_us) < _MOST and (len(own_us) < _CLEAN or late_us):
        call.before()
        began = time.process_time_ns()
        result = call.run()
        ended, returned = others_ns(), time.process_time_ns()
        _wait_for_others()
        after_us = (others_ns() - ended) / 1e3
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
        f"other threads compute for {figures(statistics.median(late_us))} us after a call of "
        f"{figures(statistics.median(own_us))} us of CPU time has returned: the call does not wait for all of its work"
    )


def _wait_for_others() -> None:
    """Wait until no other thread runs or could run."""
    quiet, ends, own = 0, time.perf_counter() + _LONGEST_S, str(threading.get_native_id())
    while quiet < _CLEAN and time.perf_counter() < ends:
        time.sleep(_LOOK_S)
        quiet = 0 if any(state == "R" for thread, state in _threads() if thread != own) else quiet + 1


def _threads() -> Iterator[tuple[str, str]]:
    """Yield the number and the state of each thread; none where the kernel does not tell."""
    for task in _TASKS.glob("*") if _TASKS.is_dir() else ():
        with contextlib.suppress(OSError):
            # "2181 (python) S ...": proc_pid_stat(5). A name may contain spaces and parentheses.
            yield task.name, (task / "stat").read_text().rpartition(")")[2].split()[0]
