"""LaunchPlan: the jobs of a sweep as groups, one a case, in the order in which tasks should take them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from attn_exp.core.case import Case
from attn_exp.core.flops import flops
from attn_exp.core.record import Record, Request, write_whole

_FILE_NAME = "plan.json"


@dataclass(frozen=True, kw_only=True)
class Group:
    """The rivals of one case. They share a GPU, since two of one host differ by 2 %; `gpu_uuid` if it is settled."""

    jobs: tuple[Request, ...]
    gpu_uuid: str | None = None


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What tasks are told: the groups, the sweep's folder, how to isolate, and where the command was typed.

    `gpus` are the GPUs of which task number N leases the N-th alone; empty if a task takes any that it sees.
    """

    folder: str
    cwd: str
    isolation: dict[str, Any]
    groups: tuple[Group, ...]
    gpus: tuple[str, ...] = ()

    @property
    def jobs(self) -> int:
        """How many jobs all groups have."""
        return sum(len(group.jobs) for group in self.groups)


def group_jobs(requests: Iterable[Request], done: Mapping[Case, str | None]) -> tuple[Group, ...]:
    """Requests by case, the longest first, so that no task is left alone with a long one at the end.

    `done` says on which GPU rivals of a case were measured before: the rest goes there too.
    """
    by_case: dict[Case, dict[str, Request]] = {}
    for request in requests:
        by_case.setdefault(request.case, {})[request.job] = request
    groups = [Group(jobs=tuple(jobs.values()), gpu_uuid=done.get(case)) for case, jobs in by_case.items()]
    return tuple(sorted(groups, key=_work, reverse=True))


def gpu_of(record: Record, gpus: Sequence[str]) -> str | None:
    """The GPU that a record was measured on, if it is one of these."""
    found = record.request.gpu_uuid
    return found if found is not None and found in gpus else None


def write_plan(plan: LaunchPlan, launch: Path) -> None:
    """Write `plan.json` into the launch's folder."""
    write_whole(launch / _FILE_NAME, msgspec.json.encode(plan))


def read_plan(launch: Path) -> LaunchPlan:
    """The plan of a launch."""
    return msgspec.json.decode((launch / _FILE_NAME).read_bytes(), type=LaunchPlan)


def _work(group: Group) -> tuple[int, int]:
    case = group.jobs[0].case
    return len(group.jobs) * (flops(case, "forward") + flops(case, "backward")), len(group.jobs)
