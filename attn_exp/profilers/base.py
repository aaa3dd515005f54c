"""The contract of profilers, and the timed job that they are given."""

import csv
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from attn_exp.backends.base import Backend, made_from
from attn_exp.core.case.case import Case
from attn_exp.core.errors import how_it_ended
from attn_exp.core.record.file import LOG_NAME
from attn_exp.core.record.profile import RESULT_NAME, Profile, ProfiledKernel
from attn_exp.core.record.record import Record
from attn_exp.core.record.request import Request
from attn_exp.timers.call import Call, synchronize
from attn_exp.timers.gpu import Gpu


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
    """Profiles a job after its timing. The constructor takes the options of the profiler's YAML, `name` among them."""

    name: str

    def profile(self, subject: Subject) -> Profile:
        """Return the profile. Its seconds and the limit of file sizes are handled by the caller.

        Raises Unavailable if a program, package, permission or device is missing; the message says how to get it.
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

    Raises Unavailable if the class cannot be imported or does not take the options.
    """
    profiler: Profiler = made_from(f"profiler.{options['name']}", options)
    return profiler


def kernels_csv(kernels: Sequence[ProfiledKernel]) -> str:
    """Return `pass`, `name`, `count`, `time_us`, `share` of the pass's time, then all figures. Empty where unknown."""
    figures = list(dict.fromkeys(name for kernel in kernels for name in kernel.figures))
    whole: dict[str, float] = {}
    for kernel in kernels:
        whole[kernel.direction] = whole.get(kernel.direction, 0.0) + (kernel.time_us or 0.0)
    rows = []
    for kernel in kernels:
        share = kernel.time_us / whole[kernel.direction] if kernel.time_us else None
        known = [kernel.count, kernel.time_us, share, *(kernel.figures.get(name) for name in figures)]
        cells = (f"{value:.6g}" if isinstance(value, (int, float)) else value for value in known)
        rows.append([kernel.direction, kernel.name, *cells])
    return csv_text(["pass", "name", "count", "time_us", "share", *figures], rows)


def csv_text(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table as CSV; None is an empty cell."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([header, *rows])
    return buffer.getvalue()


# The worker's entry point that prepares the job again and runs the profiler; profilers do not import the worker.
_ENTRY = "attn_exp.worker.profile_apart"


class ProcessLost(Exception):
    """The profiler's process ended without a result; the message says how."""


def profile_apart(subject: Subject, options: Mapping[str, Any]) -> Profile:
    """Run the profiler that `options` describe in a new process and return its profile.

    `options` are `_target_`, `name` and the constructor's arguments. The new process is killed when this one ends.
    Raises ProcessLost if it ended without a result.
    """
    name, encoded = options["name"], msgspec.json.encode(options).decode()
    command = [sys.executable, "-m", _ENTRY, str(subject.job), encoded, "--parent", str(os.getpid())]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, check=False)
    path = subject.folder / RESULT_NAME
    if not path.exists():
        how = how_it_ended(ended.returncode)
        raise ProcessLost(f"the process of profiler={name} {how}: see {subject.job / LOG_NAME}")
    profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    path.unlink()
    return profile
