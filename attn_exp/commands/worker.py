"""`attn-exp worker`: measures the job of a folder again, in this process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attn_exp.commands.options import Arguments, Command, Option, Positional
from attn_exp.core.values import truth


def run(given: Arguments) -> int:
    """Measure the job, or call it once; return the exit code."""
    # A run starts its workers as `python -m attn_exp.worker`, without the imports of this process.
    from attn_exp.worker.__main__ import measure_again

    return measure_again(Path(given.words[0]), once=given.get("once", False))


def run_here(folders: Sequence[Path], beside: Path | None, device: Any) -> Any:
    """Measure jobs in this process, for `isolation=none`; return the device for the next ones."""
    from attn_exp.worker.__main__ import run_jobs

    return run_jobs(folders, device, beside=beside)[0]


COMMAND = Command(
    name="worker",
    usage="JOB_FOLDER [once=true]",
    about=(
        "Measures the job of a folder again, in this process, and overwrites its record: for debugging a backend. "
        "With once=true it times nothing and calls each pass once, warm, between cudaProfilerStart and "
        "cudaProfilerStop, for external profilers such as Nsight Compute."
    ),
    examples=(
        ("attn-exp worker multirun/first/flash-8383c16af6", "measure it again"),
        ("ncu --profile-from-start off attn-exp worker FOLDER once=true", "look at it with Nsight Compute"),
    ),
    positional=Positional(
        name="JOB_FOLDER",
        help="a job's folder, with its request.yaml, or a duel's",
        least=1,
        most=1,
        example="attn-exp worker multirun/SWEEP/JOB",
    ),
    options=(
        Option(
            name="once",
            value="true",
            help="call each pass once, time nothing",
            read=truth,
            default="false",
            choices=("true", "false"),
        ),
    ),
    exits=("0 the job has a record", "2 invalid command line"),
    run=run,
    bare=("once",),
)
main = COMMAND.main
