"""The statuses of a job: what each means, whether it is final, and which files set it. Their only home.

Records, requests (`stop_on`), MLflow, plots and the table in docs/running_sweeps.md are made from `STATUSES`. In the
worker, exceptions become a status in `Attempt.run`; the parent sets those of workers that died.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal[
    "ok",
    "unsupported",
    "wrong_kernel",
    "inaccurate",
    "nondeterministic",
    "implausible",
    "out_of_memory",
    "unavailable",
    "timeout",
    "crashed",
    "error",
]


@dataclass(frozen=True, slots=True)
class StatusInfo:
    """The meaning of one status.

    Attributes:
        meaning: an explanation in one line, for tables and docs.
        final: whether running the same command again keeps the record, since another attempt cannot change it.
        set_by: the files of the package that set it.
        why: the event for which each of them sets it.
        finished: whether MLflow shows the run as FINISHED: the job ended as its case and machine require.
        short: the name in narrow cells of a plot.
    """

    meaning: str
    final: bool
    set_by: tuple[str, ...]
    why: str
    finished: bool = False
    short: str = ""


STATUSES: dict[Status, StatusInfo] = {
    "ok": StatusInfo(
        "measured and checked; the only status with numbers",
        final=True,
        set_by=("worker/attempt.py",),
        why="every check passed, before and after timing",
        finished=True,
    ),
    "unsupported": StatusInfo(
        "the backend cannot compute this case; the reason says why",
        final=True,
        set_by=("worker/prepare.py", "worker/attempt.py", "worker/measure.py"),
        why="the backend refuses the case, torch.compile with fullgraph=true meets a graph break, a kernel needs more "
        "than the GPU has, or no CUDA graph can hold the call",
        finished=True,
        short="unsup.",
    ),
    "wrong_kernel": StatusInfo(
        "other kernels ran than the backend claims",
        final=True,
        set_by=("worker/kernels.py",),
        why="the kernels whose names the backend claims took too small a share of a traced call's time, or a call ran "
        "none",
    ),
    "inaccurate": StatusInfo(
        "output or gradients are too far from the float32 reference",
        final=True,
        set_by=(
            "worker/prepare.py",
            "worker/check/form.py",
            "worker/check/check.py",
            "worker/check/values.py",
            "worker/check/serving.py",
            "worker/determinism.py",
        ),
        why="the first call, or a call after the timing, exceeds a tolerance or is wrong at the mask's boundary",
    ),
    "nondeterministic": StatusInfo(
        "its option `deterministic` promises equal results of equal calls, and they differ",
        final=True,
        set_by=("worker/determinism.py",),
        why="`determinism=true` compared 100 calls on the same inputs",
        short="nondet.",
    ),
    "implausible": StatusInfo(
        "faster than this machine can be, or timed without a part of its work",
        final=False,
        set_by=("worker/limits.py", "worker/kernels.py"),
        why="the time is below what the GPU's datasheet, 1.5 times the machine's matrix product, or the call's own "
        "kernels allow, or the call's stream does not wait for all of its work",
    ),
    "out_of_memory": StatusInfo(
        "the case does not fit",
        final=True,
        set_by=("worker/attempt.py", "worker/check/check.py", "execution/worker.py"),
        why="an allocation failed, or the kernel killed the worker for its memory; measured again if others had taken "
        "more than 1.5 GiB",
        short="memory",
    ),
    "unavailable": StatusInfo(
        "a package or the device is missing",
        final=False,
        set_by=("worker/attempt.py", "worker/__main__.py"),
        why="an import failed, or PyTorch sees no CUDA device",
        finished=True,
        short="unavail.",
    ),
    "timeout": StatusInfo(
        "longer than `isolation.timeout_s`; the worker was killed",
        final=False,
        set_by=("execution/worker.py",),
        why="the parent waited for the worker for as long as the limit allows",
    ),
    "crashed": StatusInfo(
        "the worker process died",
        final=False,
        set_by=("execution/worker.py", "sweep/parallel.py"),
        why="the worker, or the launcher's task around it, ended before it wrote a record",
    ),
    "error": StatusInfo(
        "the backend raised an exception",
        final=False,
        set_by=("worker/attempt.py", "worker/loaded.py", "execution/job_queue.py"),
        why="an exception that no other status describes, a worker that ended without a record, or a backend whose "
        "files were changed between the command and its job",
    ),
}

# The memory that others must hold to be the cause. Libraries that the job loaded held 0.9 GB of an idle H200.
_MUCH_BYTES = 1 << 30


def is_final(status: Status, environment: Mapping[str, Any]) -> bool:
    """Whether the same command keeps a record: another attempt cannot change it, nor was it others who caused it."""
    others = environment.get("memory_of_others")
    return STATUSES[status].final and not (status == "out_of_memory" and others and others[0] > _MUCH_BYTES)


def with_others(reason: str | None, others: tuple[int, int] | None) -> str | None:
    """Return the reason of `out_of_memory` with how much of the memory others had taken, if that was much."""
    if others is None or others[0] <= _MUCH_BYTES:
        return reason
    return f"{reason}; {others[0] / 1e9:.1f} of {others[1] / 1e9:.0f} GB were taken by others"
