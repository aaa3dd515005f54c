"""The profiler contract: a job that has been timed, and what may be asked about it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from attn_exp.backends.base import Backend, made_from
from attn_exp.core.case import Case
from attn_exp.core.profile import Profile
from attn_exp.core.record import Record, Request
from attn_exp.timers.loop import Call
from attn_exp.worker.device import Machine


@dataclass(frozen=True)
class Subject:
    """A job that has been timed, as a profiler sees it.

    `calls` has a zero-argument callable a pass, warm, to be called inside of `scope()`. `record` holds what the timing
    found. `job` is the job's folder, with its `request.yaml`; `folder` lies inside of it, is there and empty, and is
    where the profiler's files go.
    """

    record: Record
    backend: Backend
    calls: dict[str, Call]
    scope: Callable[[], AbstractContextManager[Any]]
    machine: Machine
    job: Path
    folder: Path

    @property
    def request(self) -> Request:
        """What was asked for."""
        return self.record.request

    @property
    def case(self) -> Case:
        """The problem."""
        return self.record.request.case

    def kept(self, *names: str) -> tuple[str, ...]:
        """Names of files in `folder` as a profile lists them, those that are there."""
        return tuple(str((self.folder / name).relative_to(self.job)) for name in names if (self.folder / name).exists())


class Profiler(Protocol):
    """Looks at a job after its timing. The constructor takes the options of the profiler's YAML, `name` among them."""

    name: str

    def profile(self, subject: Subject) -> Profile:
        """What it found; seconds and the size of files are seen to elsewhere.

        Raises:
            Unavailable: a program, a package, a permission or the device is missing; the message says the remedy.
        """
        ...


@runtime_checkable
class Early(Protocol):
    """What a profiler has that must be there before the job's kernels are loaded, in a process of its own."""

    def begin(self, folder: Path) -> None:
        """Begin to look; `folder` is the subject's to come."""
        ...


def load_profiler(options: dict[str, Any]) -> Profiler:
    """The profiler that a configuration names by `_target_`; its other keys go to the constructor.

    Raises:
        Unavailable: the class cannot be imported or does not take the options.
    """
    profiler: Profiler = made_from(f"profiler.{options['name']}", options)
    return profiler
