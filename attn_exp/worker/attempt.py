"""Attempt: a job under way, from its request to the record that it will become, whatever happens."""

import contextlib
import re
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from attn_exp.attention.inputs import distribution
from attn_exp.backends.compile import break_reason
from attn_exp.backends.package import Refused, Unavailable
from attn_exp.core.catalogue import about_backend
from attn_exp.core.flops import CONVENTION
from attn_exp.core.record import CompileRecord, PassRecord, Record, Request
from attn_exp.core.status import Status
from attn_exp.worker.device import Machine, versions
from attn_exp.worker.nvtx import marked

# How PyTorch's allocator on a CPU words it; on a GPU it raises torch.OutOfMemoryError.
_CPU_MEMORY_ERROR = re.compile(r"DefaultCPUAllocator|can't allocate memory|not enough memory")
# How Triton words it, and Inductor around it with the kernel's name for the resource's.
_OUT_OF_RESOURCE = re.compile(r"out of resource: .*?Required: ?(\d+),? Hardware limit: ?(\d+)")
_LONGEST = 400


class Stopped(Exception):
    """The job ends here with a status that is not `ok`."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status: Status = status
        self.reason = reason


@dataclass
class Attempt:
    """What a job has found so far."""

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
    stages_s: dict[str, float] = field(default_factory=dict)
    started_at: float = field(default_factory=time.time)
    # Seconds of stages that have ended inside of the one under way.
    _inner_s: float = 0.0

    @property
    def with_gradients(self) -> bool:
        """Whether the backward is measured, so that the forward saves what it needs."""
        return "backward" in self.request.measuring.passes

    def run(self, work: Callable[[], None]) -> None:
        """Do a part of the job. Whatever goes wrong becomes its status; only the death of the process escapes."""
        try:
            work()
        except Stopped as stopped:
            self.status, self.reason = stopped.status, stopped.reason
        except Refused as error:
            self.status, self.reason = "unsupported", f"{self.request.backend['name']}: {error}"
        except Unavailable as error:
            self.status, self.reason = "unavailable", str(error)
        except ImportError as error:
            self.status, self.reason = "unavailable", f"a package is missing: {error}"
        except (torch.OutOfMemoryError, MemoryError) as error:
            self.status, self.reason = "out_of_memory", sentence(error)
        except Exception as error:  # a backend may raise anything, and it must end as a status, not as a dead worker
            traceback.print_exc()
            refused = break_reason(error) or beyond_this_gpu(error)
            memory = _CPU_MEMORY_ERROR.search(str(error))
            self.status = "unsupported" if refused else "out_of_memory" if memory else "error"
            self.reason = refused or sentence(error)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the wall time of what is done inside under `name`, without that of stages inside of it."""
        outer_s, self._inner_s = self._inner_s, 0.0
        began = time.perf_counter()
        try:
            with marked("phase", name, self.request.device):
                yield
        finally:
            spent_s = time.perf_counter() - began
            self.stages_s[name] = self.stages_s.get(name, 0.0) + spent_s - self._inner_s
            self._inner_s = outer_s + spent_s

    def _versions(self, machine: Machine) -> dict[str, Any]:
        """The versions in the machine's environment with those of a backend that does not come with the package."""
        config = self.request.config.get("backend", {})
        own = versions(about_backend(str(self.request.backend["name"]), config.get("about")).packages)
        known = machine.environment.get("versions", {})
        return {"versions": known | own} if own else {}

    def record(self, machine: Machine) -> Record:
        """The record of what was found: numbers if and only if all went well."""
        found = {
            "inputs": distribution(self.request.case),
            "gradients_enabled": self.with_gradients,
            "flops_convention": CONVENTION,
        }
        return Record(
            request=self.request,
            status=self.status,
            reason=self.reason,
            passes=self.passes,
            metrics=self.metrics if self.status == "ok" else {},
            flags=tuple(sorted(self.flags)),
            environment=machine.environment | found | self._versions(machine),
            ceilings=self.ceilings,
            canaries=machine.canaries,
            compiled=self.compiled,
            notes=self.notes,
            telemetry=tuple(self.telemetry),
            stages_s={name: round(seconds, 6) for name, seconds in self.stages_s.items()},
            started_at=self.started_at,
            finished_at=time.time(),
        )


def beyond_this_gpu(error: BaseException) -> str | None:
    """That a kernel needs more of a multiprocessor than there is, if that is what an exception says."""
    found = _OUT_OF_RESOURCE.search(str(error))
    if found is None:
        return None
    return f"a kernel needs {found[1]} of what this GPU has {found[2]} of, as a rule bytes of shared memory"


def sentence(error: BaseException) -> str:
    """The type of an exception and the first line of what it says, cut short where it is a page."""
    lines = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return said if len(said) <= _LONGEST else f"{said[:_LONGEST]} ..."
