"""A task, which a launcher starts for each GPU: it leases the GPU and measures groups of jobs with its own worker.

It logs to no tracker and prints nothing: it writes records into their folders and reports to the parent over the board.
A task ends as soon as the parent does.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from attn_exp.core.errors import UserError, first_line
from attn_exp.core.files import be_as_private_as
from attn_exp.core.host.nvml import GpuInfo, visible_gpus
from attn_exp.core.record.request import Request
from attn_exp.execution.gpus import Lease, held_too_long, try_lease
from attn_exp.execution.isolation import make_isolation
from attn_exp.execution.job_queue import JobQueue
from attn_exp.execution.worker import Worker
from attn_exp.sweep.board import TaskBoard
from attn_exp.sweep.plan import LaunchPlan, read_plan

_POLL_S = 0.25
_LEASE_S = 0.5


def run_in_process(launch: str, task: int) -> None:
    """Run a task in a process that an engine started, from the folder in which the command was typed."""
    with contextlib.suppress(OSError):
        os.chdir(read_plan(Path(launch)).cwd)
    run_task(Path(launch), task)


def run_task(launch: Path, task: int) -> None:
    """Measure groups of jobs until none is left or the parent says stop."""
    plan, board = read_plan(launch), TaskBoard(launch, task)
    board.append("hello", socket.gethostname())
    gpus = visible_gpus() if plan.groups[0].jobs[0].device == "cuda" else []
    if plan.gpus:
        gpus = [gpu for gpu in gpus if gpu.uuid == plan.gpus[task]]
    lease = _lease(plan, board, gpus)
    try:
        uuid = lease.gpu.uuid if lease else None
        if lease or not gpus:
            _measure(plan, board, uuid)
    finally:
        if lease:
            lease.release()
        board.append("bye")


def _measure(plan: LaunchPlan, board: TaskBoard, uuid: str | None) -> None:
    be_as_private_as(Path(plan.folder))
    isolation = make_isolation(plan.isolation)
    assert isinstance(isolation, Worker)
    queue = JobQueue(isolation, Path(plan.folder), uuid)
    groups = _groups(plan, board, uuid)
    with _killed_on_stop(board, isolation) as stopped:
        more = True
        while not stopped.is_set() and (more or queue.waiting):
            requests = next(groups, None) if more else None
            more = requests is not None
            ahead = 0
            if requests is not None:
                for request in requests:
                    board.append("begin", request.job)
                queue.submit(requests)
                # The worker reads the next jobs while it measures these, except on a CPU, where it would disturb them.
                ahead = 1 if requests[0].device == "cuda" else 0
            # No case is taken from other tasks while all jobs of one are still to be measured.
            while queue.waiting > ahead and not stopped.is_set():
                outcome = queue.wait()
                if not stopped.is_set():
                    board.append("end", queue.record(outcome).request.job)


def _groups(plan: LaunchPlan, board: TaskBoard, uuid: str | None) -> Iterator[list[Request]]:
    """Yield the jobs of one group after another: first of groups that belong to this GPU, then of others.

    Those of a group that are measured otherwise, by another timer for instance, take no turns with each other.
    """
    for group in _own(plan, uuid):
        if board.take(group):
            alike: dict[Any, list[Request]] = {}
            for request in plan.groups[group].jobs:
                alike.setdefault(request.turns_key, []).append(request)
            yield from alike.values()


def _own(plan: LaunchPlan, uuid: str | None) -> list[int]:
    """Return the groups that this GPU may take; those that belong to it come first."""
    mine = [number for number, group in enumerate(plan.groups) if group.gpu_uuid == uuid and uuid is not None]
    return mine + [number for number, group in enumerate(plan.groups) if group.gpu_uuid is None]


def _lease(plan: LaunchPlan, board: TaskBoard, gpus: list[GpuInfo]) -> Lease | None:
    """Lease the first of these GPUs that becomes free while a group is left for it, and within `plan.gpu_wait_s`."""
    waiting, began = False, time.monotonic()
    while gpus and any(not board.taken(group) for group in _own(plan, gpus[0].uuid)) and board.should_continue():
        lease = try_lease(gpus)
        if lease:
            return lease
        if not waiting:
            board.append("wait", f"{gpus[0].index} ({gpus[0].name})")
            waiting = True
        if time.monotonic() - began >= plan.gpu_wait_s:
            # No failure yet: tasks that have a GPU may measure all jobs.
            board.append("held", held_too_long(gpus[0], plan.gpu_wait_s))
            break
        time.sleep(_LEASE_S)
    return None


@contextlib.contextmanager
def _killed_on_stop(board: TaskBoard, isolation: Worker) -> Iterator[threading.Event]:
    """Kill the worker as soon as the parent says stop, which sets the event, and in any case at the end."""
    stopped, over = threading.Event(), threading.Event()

    def look() -> None:
        while not over.wait(_POLL_S):
            if stopped.is_set() or not board.should_continue():
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


class LocalGpus:
    """hydra/launcher=local_gpus: a task for each GPU that CUDA_VISIBLE_DEVICES names, in a thread of this process.

    Threads are enough: a task only waits for its worker, which is a process.
    """

    name = "local_gpus"
    pinned = True

    def __init__(self, device: str, gpus: list[GpuInfo]) -> None:
        """Raises UserError if there is no GPU, or if `device` names one of them."""
        if device not in ("auto", "cuda"):
            raise UserError(
                f"hydra/launcher=local_gpus takes all GPUs: leave device={device} out, or leave hydra/launcher out"
            )
        if not gpus:
            raise UserError("there is no NVIDIA GPU here for jobs side by side: leave hydra/launcher out")
        self.gpus = gpus
        self.tasks = len(gpus)
        self._pool: ThreadPoolExecutor | None = None

    def run(self, launch: Path, tasks: int, say: Callable[[str], None], over: Callable[[], bool]) -> dict[int, str]:
        """As `Launcher.run`; all tasks start at once."""
        # Not `with`: leaving it after Ctrl-C would wait for tasks that were not cancelled.
        self._pool = ThreadPoolExecutor(tasks)
        ended = [self._pool.submit(_end_of_task, launch, task) for task in range(tasks)]
        return {task: why for task, one in enumerate(ended) if (why := one.result()) is not None}

    def close(self) -> None:
        """Wait for the threads, which end with what they wait for."""
        if self._pool is not None:
            self._pool.shutdown()


def _end_of_task(launch: Path, task: int) -> str | None:
    # If one task fails, for instance at a full disk, the others go on.
    try:
        run_task(launch, task)
    except Exception as error:
        return first_line(error)
    return None
