"""Some backends on one case with every kind of inputs, in a process of bench/hard_values.py.

A backend is prepared once for a case, and the kinds are written into the tensors that it reads, as a job does between
its calls: it compiles once. The references are shared by the backends.
"""

import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accuracy import compared, computed

from attn_exp.core.case.case import NORMAL, Case

if TYPE_CHECKING:
    from attn_exp.attention.expected import Expected
    from attn_exp.attention.inputs import Inputs

Row = dict[str, object]


@dataclass(frozen=True)
class Task:
    """Backends and kinds of inputs to be checked on a case.

    Attributes:
        index: the case's place among all.
        case: the case.
        seed: of its inputs.
        todo: pairs of a backend's configuration and the kinds that are not done.
        device: `cpu` or `cuda`.
    """

    index: int
    case: Case
    seed: int
    todo: tuple[tuple[dict[str, object], tuple[str, ...]], ...]
    device: str


@dataclass(frozen=True)
class Said:
    """A backend and a kind: begun, or with its rows."""

    backend: str
    kind: str
    rows: tuple[Row, ...] | None = None


def check(task: Task) -> Iterator[Said]:
    """Say what is begun, and the rows of what is done.

    Raises:
        RuntimeError: the GPU is in an error that this process cannot leave.
    """
    import torch

    from attn_exp.backends.compile import reset_dynamo

    torch.set_num_threads(1)
    if task.device == "cuda":
        # A backward runs where its forward ran, and graphs cannot be captured on the default stream.
        torch.cuda.set_stream(torch.cuda.Stream())
    reset_dynamo()
    references = _References(task)
    for config, kinds in task.todo:
        name = str(config["name"])
        rows: list[Row] = []
        made = None
        for kind in kinds:
            yield Said(name, kind)
            if not rows or rows[0]["status"] not in ("unsupported", "unavailable"):
                try:
                    made = made or _Made(task, config, references)
                    rows = made.rows(kind)
                except Exception as error:  # every backend may fail in its own way
                    rows, made = [_failed(error)], None
            yield Said(name, kind, tuple(rows))
            if task.device == "cuda":
                torch.cuda.synchronize()


def _failed(error: Exception) -> Row:
    from attn_exp.backends.package import Refused, Unavailable
    from attn_exp.worker.attempt import beyond_this_gpu, error_summary

    if isinstance(error, Unavailable):
        return {"status": "unavailable", "reason": str(error)}
    refused = str(error) if isinstance(error, Refused) else beyond_this_gpu(error)
    if refused:
        return {"status": "unsupported", "reason": refused}
    traceback.print_exc()
    return {"status": "error", "reason": error_summary(error)}


class _References:
    """Inputs of a case, and their references, which are made once."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._kept: dict[tuple[str, bool], Expected] = {}

    def inputs(self, kind: str, *, with_gradients: bool) -> "Inputs":
        from attn_exp.attention.hard_values import make_inputs_of

        task = self._task
        return make_inputs_of(kind, task.case, task.device, task.seed, with_gradients=with_gradients)

    def of(self, kind: str, *, with_gradients: bool) -> "Expected":
        from attn_exp.attention.expected import expected

        key = kind, with_gradients
        if key not in self._kept:
            inputs = self.inputs(kind, with_gradients=with_gradients)
            self._kept[key] = expected(self._task.case, inputs, with_gradients=with_gradients)
        return self._kept[key]


class _Made:
    """A backend that is prepared for a case, on normal inputs."""

    def __init__(self, task: Task, config: dict[str, Any], references: _References) -> None:
        from attn_exp.backends.base import load_backend, supported_passes
        from attn_exp.backends.package import Refused

        self._task, self._references = task, references
        backend = load_backend(config)
        reason = backend.unsupported(task.case, task.device)
        if reason:
            raise Refused(reason)
        self._with_gradients = "backward" in supported_passes(backend, task.case)
        self._inputs = references.inputs(NORMAL, with_gradients=self._with_gradients)
        self._calls = backend.prepare(task.case, self._inputs)

    def rows(self, kind: str) -> list[Row]:
        """Return a row for each tensor, on inputs of a kind."""
        task, calls = self._task, self._calls
        values = self._references.inputs(kind, with_gradients=self._with_gradients)
        wanted = self._references.of(kind, with_gradients=self._with_gradients)
        read = calls.inputs or self._inputs
        for tensor, value in zip((*read.operands, read.d_out), (*values.operands, values.d_out), strict=True):
            tensor.data.copy_(value.detach())
        tensors = computed(calls, task.device, values.q_bhsd.numel(), with_gradients=self._with_gradients)
        return compared(task.case, values, wanted, tensors, calls)
