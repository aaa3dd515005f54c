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
from attn_exp.timers.gpu import Gpu
from attn_exp.timers.loop import Call
from attn_exp.timers.sync import synchronize


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
        """What was asked for."""
        return self.record.request

    @property
    def case(self) -> Case:
        """The problem."""
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
