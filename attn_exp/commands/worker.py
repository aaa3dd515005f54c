"""`attn-exp worker`: measures the job of a folder again, in this process."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_exp.commands.options import Command
from attn_exp.core.options import Options, option


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(Options):
    """Measures the job of a folder again, in this process, and overwrites its record: for debugging a backend.

    With once=true it times nothing and calls each pass once, warm, between cudaProfilerStart and cudaProfilerStop, for
    external profilers such as Nsight Compute.
    """

    job: Path = option(
        "a job's folder, with its request.yaml, or a duel's", "JOB_FOLDER", example="attn-exp worker multirun/SWEEP/JOB"
    )
    once: bool = option("call each pass once, time nothing", bare=True)


def run(options: WorkerOptions) -> int:
    """Measure the job, or call it once; return the exit code."""
    # A run starts its workers as `python -m attn_exp.worker`, without the imports of this process.
    from attn_exp.worker.__main__ import measure_again

    return measure_again(options.job, once=options.once)


def run_here(folders: Sequence[Path], beside: Path | None, device: Any) -> Any:
    """Measure jobs in this process, for `isolation=none`; return the device for the next ones."""
    from attn_exp.worker.__main__ import run_jobs

    return run_jobs(folders, device, beside=beside)[0]


COMMAND = Command(
    name="worker",
    usage="JOB_FOLDER [once=true]",
    options=WorkerOptions,
    run=run,
    examples=(
        ("attn-exp worker multirun/first/flash-8383c16af6", "measure it again"),
        ("ncu --profile-from-start off attn-exp worker FOLDER once=true", "look at it with Nsight Compute"),
    ),
    exits=("0 the job has a record", "2 invalid command line"),
)
main = COMMAND.main
