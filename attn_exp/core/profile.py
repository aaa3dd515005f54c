"""Profile: what one profiler found out about a job. Its times stand here alone, never among the job's metrics."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

# Where profiles lie in a job's folder: `profiles/PROFILER/FILE`.
FOLDER = "profiles"

# What a profiler's own process leaves for the process that started it.
RESULT_NAME = "profile.json"
# Inductor's column: which of its arguments a kernel writes into.
IN_PLACE = "mutated_arg_names"

ProfileStatus = Literal["ok", "unavailable", "failed"]


@dataclass(frozen=True, kw_only=True)
class ProfiledKernel:
    """A kernel as a profiler saw it. `direction` is the pass that it ran in.

    `count` and `time_us` are of one call, None where the profiler does not know; `figures` are what else is known, by
    the profiler's own names: grid, registers, tflops.
    """

    direction: str
    name: str
    count: float | None = None
    time_us: float | None = None
    figures: dict[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What one profiler left of one job.

    `reason` is one sentence: why there is no profile, or, beside `ok`, what is missing of it. `metrics` go to MLflow
    as `PROFILER/NAME`, `files` are relative to the job's folder.
    """

    status: ProfileStatus
    reason: str | None = None
    seconds: float = 0.0
    kernels: tuple[ProfiledKernel, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    files: tuple[str, ...] = ()


def profile_folder(job: Path, profiler: str) -> Path:
    """The folder of one profiler's files inside of a job's folder."""
    return job / FOLDER / profiler
