"""The contract of profilers, and the timed job that they are given."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from attn_exp.backends.base import Backend, made_from
from attn_exp.core.case import Case
from attn_exp.core.profile import Profile
from attn_exp.core.record import Record
from attn_exp.core.request import Request
from attn_exp.timers.gpu import Gpu
from attn_exp.timers.sync import synchronize
from attn_exp.timers.timed_call import Call


@dataclass(frozen=True)
class Subject:
    """A timed job as a profiler sees it.

    Attributes:
        record: the record that the timing produced.
        backend: the backend that made the calls.
        calls: a warm zero-argument callable for each pass; call it inside `scope()`.
        scope: makes the context manager that the calls run in.
        gpu: the GPU's clock and queue, None on a CPU.
        job: the job's folder, with its `request.yaml`.
        folder: an existing, empty folder inside `job` for the profiler's files.
    """

    record: Record
    backend: Backend
    calls: dict[str, Call]
    scope: Callable[[], AbstractContextManager[Any]]
    gpu: Gpu | None
    job: Path
    folder: Path

    @property
    def request(self) -> Request:
        """Return the job's request."""
        return self.record.request

    @property
    def case(self) -> Case:
        """Return the job's case."""
        return self.record.request.case

    @property
    def device(self) -> str:
        """Return `cuda` or `cpu`."""
        return self.record.request.device

    def evict_caches(self) -> None:
        """Bring the GPU's caches into the state that the job was timed in, then wait for the device."""
        if self.gpu is not None:
            self.gpu.flush(self.request.measuring.l2)
        synchronize(self.device)

    def kept(self, *names: str) -> tuple[str, ...]:
        """Return those of the files in `folder` that exist, with paths as a profile lists them."""
        return tuple(str((self.folder / name).relative_to(self.job)) for name in names if (self.folder / name).exists())


class Profiler(Protocol):
    """Profiles a job after its timing.

    The constructor takes the options of the profiler's YAML, `name` among them.
    """

    name: str

    def profile(self, subject: Subject) -> Profile:
        """Return the profile. Its seconds and the limit of file sizes are handled by the caller.

        Raises:
            Unavailable: a program, package, permission or device is missing; the message says how to get it.
        """
        ...


@runtime_checkable
class Early(Protocol):
    """A profiler that must start before the job's kernels are loaded, in a process of its own."""

    def begin(self, folder: Path) -> None:
        """Start profiling; `folder` will be the subject's."""
        ...


def load_profiler(options: dict[str, Any]) -> Profiler:
    """Return the profiler that a configuration names by `_target_`, made with its other keys.

    Raises:
        Unavailable: the class cannot be imported or does not take the options.
    """
    profiler: Profiler = made_from(f"profiler.{options['name']}", options)
    return profiler
