"""The plan of a launch: the jobs of a sweep in one group per case, in the order in which tasks should take them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from attn_exp.core.case.case import Case
from attn_exp.core.case.flops import flops
from attn_exp.core.files import write_whole
from attn_exp.core.record.request import Request
from attn_exp.execution.gpus import WAIT_S

_FILE_NAME = "plan.json"


@dataclass(frozen=True, kw_only=True)
class Group:
    """The jobs of one case. They share a GPU, since two GPUs of one host differ by 2 %.

    `gpu_uuid` is the GPU on which others of this case were measured before.
    """

    jobs: tuple[Request, ...]
    gpu_uuid: str | None = None


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """The plan of a launch, which its tasks read.

    `cwd` is the folder in which the command was typed, and `isolation` has the options of `make_isolation`. Task N
    leases the N-th of the `gpus`; if there are none, a task leases any GPU that it sees, and waits `gpu_wait_s` for it.
    """

    folder: str
    cwd: str
    isolation: dict[str, Any]
    groups: tuple[Group, ...]
    gpu_wait_s: float = WAIT_S
    gpus: tuple[str, ...] = ()


def group_jobs(requests: Iterable[Request], done: Mapping[Case, str | None]) -> tuple[Group, ...]:
    """Group requests by case, the longest group first, so that no task ends long after the others.

    Others of a case may be `done`: the rest goes to the GPU on which they were measured.
    """
    by_case: dict[Case, dict[str, Request]] = {}
    for request in requests:
        by_case.setdefault(request.case, {})[request.job] = request
    groups = [Group(jobs=tuple(jobs.values()), gpu_uuid=done.get(case)) for case, jobs in by_case.items()]

    def work(group: Group) -> tuple[int, int]:
        case = group.jobs[0].case
        return len(group.jobs) * (flops(case, "forward") + flops(case, "backward")), len(group.jobs)

    return tuple(sorted(groups, key=work, reverse=True))


def write_plan(plan: LaunchPlan, launch: Path) -> None:
    """Write `plan.json` into the launch's folder."""
    write_whole(launch / _FILE_NAME, msgspec.json.encode(plan))


def read_plan(launch: Path) -> LaunchPlan:
    """Read `plan.json` from the launch's folder."""
    return msgspec.json.decode((launch / _FILE_NAME).read_bytes(), type=LaunchPlan)
