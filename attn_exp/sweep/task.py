"""Task: what a launcher starts, once a GPU: leases one, and measures the groups that it takes with a worker of its own.

It tells no tracker and shows nothing: records lie in their folders, and the parent is told over the board. A task ends
as soon as the parent does.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from attn_exp.core.nvml import GpuInfo
from attn_exp.core.record import Request
from attn_exp.run.gpus import Lease, try_lease, visible_gpus
from attn_exp.run.job_queue import JobQueue
from attn_exp.run.worker_process import Worker, make_isolation
from attn_exp.sweep.board import TaskBoard
from attn_exp.sweep.plan import LaunchPlan, read_plan

_LOOK_S = 0.25
_LEASE_S = 0.5


def run_in_process(launch: str, task: int) -> None:
    """A task in a process that an engine started: relative names count from where the command was typed."""
    with contextlib.suppress(OSError):
        os.chdir(read_plan(Path(launch)).cwd)
    run_task(Path(launch), task)


def run_task(launch: Path, task: int) -> None:
    """Measure what is left to take, until nothing is or the parent says stop."""
    plan, seat = read_plan(launch), TaskBoard(launch, task)
    seat.say("hello", socket.gethostname())
    gpus = visible_gpus() if plan.groups[0].jobs[0].device == "cuda" else []
    if plan.gpus:
        gpus = [gpu for gpu in gpus if gpu.uuid == plan.gpus[task]]
    lease = _leased(plan, seat, gpus)
    try:
        uuid = lease.gpu.uuid if lease else None
        if lease or not gpus:
            _measure(plan, seat, uuid)
    finally:
        if lease:
            lease.release()
        seat.say("bye")


def _measure(plan: LaunchPlan, seat: TaskBoard, uuid: str | None) -> None:
    isolation = make_isolation(plan.isolation)
    assert isinstance(isolation, Worker)
    runner = JobQueue(isolation, Path(plan.folder), uuid)
    requests = _taken(plan, seat, uuid)
    with _watched(seat, isolation) as stopped:
        more = True
        while not stopped.is_set() and (more or runner.waiting):
            request = next(requests, None) if more else None
            more = request is not None
            if request is not None:
                seat.say("begin", request.job)
                runner.submit(request)
                # The worker knows of the next job while it measures this one; on a CPU nothing may run beside it.
                if runner.waiting <= (1 if request.device == "cuda" else 0):
                    continue
            if runner.waiting:
                outcome = runner.wait()
                if not stopped.is_set():
                    seat.say("end", runner.record(outcome).request.job)


def _taken(plan: LaunchPlan, seat: TaskBoard, uuid: str | None) -> Iterator[Request]:
    """The jobs of one group after another: first of those that belong to this GPU, then of any."""
    for group in _own(plan, uuid):
        if seat.take(group):
            yield from plan.groups[group].jobs


def _own(plan: LaunchPlan, uuid: str | None) -> list[int]:
    """The groups that this GPU may take, those that no other may first."""
    mine = [number for number, group in enumerate(plan.groups) if group.gpu_uuid == uuid and uuid is not None]
    return mine + [number for number, group in enumerate(plan.groups) if group.gpu_uuid is None]


def _leased(plan: LaunchPlan, seat: TaskBoard, gpus: list[GpuInfo]) -> Lease | None:
    """The first of these GPUs that gets free while there is something to measure on it."""
    said = False
    while gpus and any(not seat.taken(group) for group in _own(plan, gpus[0].uuid)) and seat.wanted():
        found = try_lease(gpus)
        if found:
            return found
        if not said:
            seat.say("wait", f"{gpus[0].index} ({gpus[0].name})")
            said = True
        time.sleep(_LEASE_S)
    return None


@contextlib.contextmanager
def _watched(seat: TaskBoard, isolation: Worker) -> Iterator[threading.Event]:
    """Kill the worker as soon as the parent wants no more, and in any case at the end; the event says that it does."""
    stopped, over = threading.Event(), threading.Event()

    def look() -> None:
        while not over.wait(_LOOK_S):
            if stopped.is_set() or not seat.wanted():
                stopped.set()
                isolation.interrupt()

    thread = threading.Thread(target=look, name="attn_exp task", daemon=True)
    thread.start()
    try:
        yield stopped
    finally:
        over.set()
        thread.join()
        isolation.close()
