"""The report of a profiler about a job. Its times are kept here, never among the job's metrics."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

# The folder of profiles in a job's folder: `profiles/PROFILER/FILE`.
FOLDER = "profiles"
# Proton's tree in a job's folder, and those of all jobs in the sweep's.
TREE = "proton.hatchet"

# The file in which a profiler's own process returns its profile.
RESULT_NAME = "profile.json"
# Inductor's column with the arguments that a kernel writes into. Inductor copies them for each call that it times,
# inside the time.
IN_PLACE = "mutated_arg_names"

ProfileStatus = Literal["ok", "unavailable", "failed"]


@dataclass(frozen=True, kw_only=True)
class ProfiledKernel:
    """A kernel as a profiler saw it.

    Attributes:
        direction: the pass that it ran in.
        name: the kernel's name.
        count: launches in one call, None if unknown.
        time_us: the time in one call in microseconds, None if unknown.
        figures: other figures under the profiler's names: grid, registers, tflops.
    """

    direction: str
    name: str
    count: float | None = None
    time_us: float | None = None
    figures: dict[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The result of one profiler for one job.

    Attributes:
        status: `ok`, `unavailable` or `failed`.
        reason: one sentence: why there is no profile, or what is missing from it.
        seconds: the time that the profiler took.
        kernels: the kernels that it saw.
        metrics: logged to MLflow as `PROFILER/NAME`.
        files: paths relative to the job's folder.
    """

    status: ProfileStatus
    reason: str | None = None
    seconds: float = 0.0
    kernels: tuple[ProfiledKernel, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    files: tuple[str, ...] = ()


def profile_folder(job: Path, profiler: str) -> Path:
    """Return the folder of one profiler's files inside a job's folder."""
    return job / FOLDER / profiler
