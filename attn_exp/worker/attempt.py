"""A job in progress: collects what becomes its record, and turns every failure into a status."""

import contextlib
import re
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from attn_exp.attention.inputs import distribution
from attn_exp.backends.compile import break_reason
from attn_exp.backends.package import Refused, Unavailable
from attn_exp.core.case.flops import CONVENTION
from attn_exp.core.catalogue import about_backend
from attn_exp.core.errors import first_line
from attn_exp.core.host.process import memory_of_others, without_collections
from attn_exp.core.record.checked import Judged
from attn_exp.core.record.record import CompileRecord, PassRecord, Record
from attn_exp.core.record.request import Request
from attn_exp.core.record.status import Status, with_others
from attn_exp.core.redaction import redacted
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.machine.environment import versions
from attn_exp.worker.machine.settings import OwnState

if TYPE_CHECKING:
    from attn_exp.backends.base import Backend
    from attn_exp.timers.trace import Trace
    from attn_exp.workloads.base import Workload

# The message of PyTorch's CPU allocator; on a GPU it raises torch.OutOfMemoryError.
_CPU_MEMORY_ERROR = re.compile(r"DefaultCPUAllocator|can't allocate memory|not enough memory")
# Triton's message. Inductor wraps it and puts the kernel's name in place of the resource's.
_OUT_OF_RESOURCE = re.compile(r"out of resource: .*?Required: ?(\d+),? Hardware limit: ?(\d+)")
_LONGEST = 400


class Stopped(Exception):
    """Ends a job with a status and a reason."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status: Status = status
        self.reason = reason


@contextlib.contextmanager
def marked(kind: str, name: str, device: str) -> Iterator[None]:
    """Run what is inside in the NVTX range `kind:name`, for external profilers; do nothing on a CPU.

    Ranges are around whole phases, never around a timed call: nothing is added between the two events of a sample.
    """
    if device != "cuda":
        yield
        return
    torch.cuda.nvtx.range_push(f"{kind}:{name}")
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


@dataclass
class Attempt:
    """The results of a job so far. `run` sets the status, `record` makes the record."""

    request: Request
    status: Status = "ok"
    reason: str | None = None
    passes: dict[str, PassRecord] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)
    ceilings: dict[str, float] = field(default_factory=dict)
    compiled: CompileRecord | None = None
    notes: dict[str, float] = field(default_factory=dict)
    telemetry: list[dict[str, Any]] = field(default_factory=list)
    judged: list[Judged] = field(default_factory=list)
    # The traces that named the kernels of each pass, where no record was lost.
    traced: "dict[str, Trace]" = field(default_factory=dict)
    stages_s: dict[str, float] = field(default_factory=dict)
    started_at: float = field(default_factory=time.time)
    # Its own settings of PyTorch.
    own: OwnState | None = None
    # A function and tensors of the user's own in place of those that the request names.
    given: "tuple[Backend, Workload] | None" = None
    # The GPU's memory that other processes held when the job began, and all that there is.
    others: tuple[int, int] | None = None
    # Seconds of stages that ended inside the current one.
    _inner_s: float = 0.0

    @property
    def with_gradients(self) -> bool:
        """Whether a pass needs gradients, so that the forward has to save for them."""
        return self.request.measuring.with_gradients

    def run(self, work: Callable[[], None]) -> None:
        """Run a part of the job and turn any exception into a status."""
        try:
            # As in the sampling loop, so that calls take as long everywhere.
            with self.own_state(), without_collections():
                work()
        except Stopped as stopped:
            self.status, self.reason = stopped.status, stopped.reason
        except Exception as error:  # a backend may raise anything, and the job must end with a status
            self.status, self.reason = status_of(error, self.request.backend["name"])
            if self.status == "error":
                traceback.print_exc()

    def own_state(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a job has what it has set for itself."""
        return contextlib.nullcontext() if self.own is None else self.own.inside()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the wall time inside to `stages_s[name]`, without that of nested stages.

        Raises Stopped if the memory does not hold the reference, which the stage `accuracy` makes.
        """
        outer_s, self._inner_s = self._inner_s, 0.0
        began = time.perf_counter()
        try:
            with marked("phase", name, self.request.device):
                yield
        except Exception as error:
            if name == "accuracy" and status_of(error, "")[0] == "out_of_memory":
                reason = f"the reference does not fit, whatever the backend: {error_summary(error)}"
                raise Stopped("out_of_memory", reason) from error
            raise
        finally:
            spent_s = time.perf_counter() - began
            self.stages_s[name] = self.stages_s.get(name, 0.0) + spent_s - self._inner_s
            self._inner_s = outer_s + spent_s

    def _versions(self, machine: Machine) -> dict[str, Any]:
        """Return the environment's versions with those of a backend from elsewhere; empty if it adds none."""
        config = self.request.config.get("backend", {})
        own = versions(about_backend(str(self.request.backend["name"]), config.get("about")).packages)
        known = machine.environment.get("versions", {})
        return {"versions": known | own} if own else {}

    def record(self, machine: Machine) -> Record:
        """Return the record. It has metrics if and only if the status is `ok`."""
        added: dict[str, Any] = {
            "inputs": distribution(self.request.case, self.request.measuring.inputs),
            "gradients_enabled": self.with_gradients,
            "flops_convention": CONVENTION,
        }
        with self.own_state():
            changed = machine.settings.changed()
        if changed:
            # The backend's own: they hold while it is timed, not for the reference or for other jobs.
            added["changed_settings"] = changed
        reason = self.reason
        if self.status == "out_of_memory":
            now = memory_of_others() if machine.memory is None else machine.memory.of_others()
            # A process that has ended since held memory, too.
            others = max(filter(None, (now, self.others)), default=None)
            added |= {} if others is None else {"memory_of_others": [*others]}
            reason = with_others(reason, others)
        if self.own is not None and self.own.set_back:
            added["set_back"] = sorted(self.own.set_back)
        return Record(
            request=self.request,
            status=self.status,
            # An error may quote a variable that the worker was given.
            reason=reason and redacted(reason),
            passes=self.passes,
            metrics=self.metrics if self.status == "ok" else {},
            flags=tuple(sorted(self.flags)),
            environment=machine.environment | added | self._versions(machine),
            ceilings=self.ceilings,
            compiled=self.compiled,
            notes=self.notes,
            telemetry=tuple(self.telemetry),
            judged=tuple(self.judged),
            stages_s={name: round(seconds, 6) for name, seconds in self.stages_s.items()},
            started_at=self.started_at,
            finished_at=time.time(),
        )


def status_of(error: Exception, name: str) -> tuple[Status, str]:
    """Return the status of a job in which the backend called `name` raised this exception, and the reason."""
    summary = error_summary(error)
    match error:
        case Refused():
            return "unsupported", f"{name}: {error}"
        case Unavailable():
            return "unavailable", str(error)
        case ImportError():
            return "unavailable", f"a package is missing: {error}"
        case torch.OutOfMemoryError() | MemoryError():
            return "out_of_memory", summary
    refused = break_reason(error) or beyond_this_gpu(error)
    if refused:
        return "unsupported", refused
    return "out_of_memory" if _CPU_MEMORY_ERROR.search(str(error)) else "error", summary


def beyond_this_gpu(error: BaseException) -> str | None:
    """Return that a kernel needs more of a multiprocessor than there is, if the exception says so; None otherwise."""
    match = _OUT_OF_RESOURCE.search(str(error))
    if match is None:
        return None
    return f"a kernel needs {match[1]} of a resource of which this GPU has {match[2]}, usually bytes of shared memory"


def is_poisoned(device: str) -> bool:
    """Whether the CUDA context is unusable: device-side asserts and illegal addresses are permanent."""
    if device != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def error_summary(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message, redacted and shortened to 400 characters."""
    # Before it is shortened: a password whose end is cut off is not recognised.
    text = type(error).__name__ + (f": {redacted(first_line(error))}" if str(error).strip() else "")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
