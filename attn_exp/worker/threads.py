"""Find threads of a backend's own on a CPU: that compute beside the threads it was given, or after a call returned.

PyTorch's number of threads is in the record, and what is compared with another backend has as many. At each moment at
most so many threads should be running or waiting for a processor. The kernel counts both times for every thread, so
that a busy machine, on which threads wait for each other's processor, makes no difference. One thread after another
is no more than one, whichever it is.
"""

import contextlib
import statistics
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from attn_exp.core.text import figures
from attn_exp.timers.timed_call import Call, TimedCall, as_timed
from attn_exp.worker.attempt import Attempt, Stopped
from attn_exp.worker.cpu_time import CpuTimes, others_ns
from attn_exp.worker.judge import Judge

_TASKS = Path("/proc/self/task")
# In the timed calls: the share of CPU time in other threads, and of the call's time after it, that are looked into,
# beside microseconds a call for handing work over.
_SHARE_IN, _SHARE_AFTER, _HANDOVER_US = 0.05, 0.02, 50.0
# A block has as many calls as take so long, up to eight.
_BLOCK_US, _MOST_CALLS = 30_000.0, 8
# What is too much, in three of four blocks: of the time of as many threads as PyTorch has, and after a call.
_BESIDE, _LATE_SHARE, _LATE_US = 1.25, 0.02, 200.0
_CLEAN, _BLOCKS, _DIRTY = 2, 8, 6
# Others have ended their work if none runs, or waits for a processor, in two looks a few milliseconds apart.
_LOOK_S, _LONGEST_S = 0.002, 0.25


def check_threads(attempt: Attempt, judge: Judge, calls: Mapping[str, Call]) -> None:
    """Look into the passes whose timed calls had other threads compute.

    With more than one of PyTorch's threads, work after a call is not looked for: these threads wait by spinning.

    Args:
        attempt: the job.
        judge: has the CPU time of timed calls; the inputs are left as they are.
        calls: the timed calls of each pass.

    Raises:
        Stopped: more threads compute than PyTorch has, or some after a call has returned.
    """
    allowed, state = torch.get_num_threads(), judge.fresh.state
    for direction, known in judge.passes.items():
        if known.cpu is None or not _suspected(known.cpu, allowed):
            continue
        with attempt.stage("accuracy"):
            found = _looked_into(as_timed(calls[direction]), known.cpu, allowed)
            judge.fresh.set_forward(state)
        if found:
            raise Stopped("implausible", f"{direction}: {found}")


def _suspected(cpu: CpuTimes, allowed: int) -> bool:
    count = len(cpu.times_us)
    if count == 0:
        return False
    if allowed > 1:
        return sum(cpu.times_us) > _BESIDE * allowed * cpu.wall_us
    margin_us = _HANDOVER_US * count
    return cpu.others_us > _SHARE_IN * cpu.wall_us + margin_us or cpu.behind_us > _SHARE_AFTER * cpu.wall_us + margin_us


@dataclass(frozen=True)
class _Block:
    """What threads did in a block of calls.

    Attributes:
        beside: how many threads ran or waited for a processor while calls ran, on average.
        late_us: the CPU time of other threads after a call had returned, a call.
        wall_us: the time of a call.
    """

    beside: float
    late_us: float
    wall_us: float


def _looked_into(call: TimedCall, cpu: CpuTimes, allowed: int) -> str | None:
    """Return what threads do that they should not as a sentence, or None."""
    count = max(1, min(_MOST_CALLS, int(_BLOCK_US * len(cpu.times_us) / max(1.0, cpu.wall_us))))
    blocks: list[_Block] = []
    while len(blocks) < _BLOCKS:
        blocks.append(_block(call, count, waits=allowed == 1))
        beside = [one for one in blocks if one.beside > _BESIDE * allowed]
        late = [one for one in blocks if one.late_us > _LATE_SHARE * one.wall_us + _LATE_US]
        if len(blocks) - max(len(beside), len(late)) > _BLOCKS - _DIRTY or (
            len(blocks) == _CLEAN and not beside and not late
        ):
            return None
    if len(late) >= _DIRTY:
        late_us, wall_us = (
            statistics.median(times) for times in ([b.late_us for b in late], [b.wall_us for b in late])
        )
        return (
            f"other threads compute for {figures(late_us)} us after a call of {figures(wall_us)} us has returned: the "
            "call does not wait for all of its work"
        )
    most = statistics.median(one.beside for one in beside)
    return (
        f"{most:.1f} threads compute at a time, where PyTorch has {allowed} (torch.get_num_threads()): threads of the "
        "backend's own, which the record does not count"
    )


def _block(call: TimedCall, count: int, *, waits: bool) -> _Block:
    """Make calls, and after each of them wait until other threads rest."""
    runnable_us = wall_us = late_us = 0.0
    for _ in range(count):
        call.before()
        waited, process, wall = _waited_ns(), time.process_time_ns(), time.perf_counter_ns()
        result = call.run()
        wall_us += (time.perf_counter_ns() - wall) / 1e3
        process = time.process_time_ns() - process
        after = others_ns()
        runnable_us += (process + _waited_ns() - waited) / 1e3 - _HANDOVER_US
        if waits:
            _wait_for_others()
            late_us += (others_ns() - after) / 1e3
        call.after(result)
        del result
    return _Block(runnable_us / max(wall_us, 1.0), late_us / count, wall_us / count)


def _waited_ns() -> int:
    """Return how long all threads have waited for a processor; 0 where the kernel does not tell.

    Linux, Documentation/scheduler/sched-stats.rst: the second number of `schedstat`.
    """
    return sum(int(text.split()[1]) for text in _of_threads("schedstat"))


def _wait_for_others() -> None:
    """Wait until no other thread runs or could run."""
    quiet, ends = 0, time.perf_counter() + _LONGEST_S
    while quiet < _CLEAN and time.perf_counter() < ends:
        time.sleep(_LOOK_S)
        own = str(threading.get_native_id())
        # "2181 (python) S ...": proc_pid_stat(5). A name may contain spaces and parentheses.
        states = [text.rpartition(")")[2].split()[0] for text in _of_threads("stat") if text.split()[0] != own]
        quiet = 0 if "R" in states else quiet + 1


def _of_threads(name: str) -> Iterator[str]:
    """Yield a file of each thread that still lives."""
    for task in _TASKS.glob("*") if _TASKS.is_dir() else ():
        with contextlib.suppress(OSError):
            yield (task / name).read_text()
