"""Honest while it is looked at: by the profiler, by the number of calls, by what the judge does; and lazy results."""

import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from attn_exp.attention.inputs import Inputs
from attn_exp.core.case import Case
from cheats.gpu.base import WRONG, Forward, OnGpu, any_of, attend, batches, gpu_cheat, like_output

_LAZY = r"\btype|subclass|torch\.Tensor|mode"
_LAZY_STATUSES = ("inaccurate", "implausible", "wrong_kernel", "error")


class _Sometimes(OnGpu):
    """Computes all of the batch if `honest`, else half of it into the buffer of the calls before."""

    def honest(self) -> bool:
        """Whether to compute all of it now."""
        raise NotImplementedError

    def make(self, case: Case, inputs: Inputs) -> Forward:
        out = attend(case, *inputs.qkv)

        def forward() -> torch.Tensor:
            rows = case.batch if self.honest() else case.batch // 2
            out[:rows] = attend(case, *batches(case, inputs.qkv, 0, rows))
            return out

        return forward


@gpu_cheat("behaviour", "inaccurate", WRONG)
class HonestUnderTheProfiler(_Sometimes):
    """Computes all of the batch only while `torch.autograd._profiler_enabled()`."""

    def honest(self) -> bool:
        return torch.autograd._profiler_enabled()


@gpu_cheat("behaviour", "inaccurate", WRONG, seen="kernelbot#501")
class HonestAtFirstOnGpu(_Sometimes):
    """Computes all of the batch in the first eight calls."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls = itertools.count()

    def honest(self) -> bool:
        return next(self.calls) < 8


@gpu_cheat("behaviour", ("inaccurate", "wrong_kernel"), any_of(WRONG, "kernel"))
class HonestEachFifthTime(OnGpu):
    """Only each fifth call computes, the others copy, so that the launches differ from call to call."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        calls, kept = itertools.count(), like_output(inputs)

        def forward() -> torch.Tensor:
            if next(calls) % 5 == 0:
                kept.copy_(attend(case, *inputs.qkv))
                return kept
            return kept.clone()

        return forward


@gpu_cheat("behaviour", "inaccurate", WRONG)
class WatchesTheFlush(_Sometimes):
    """Computes all of the batch only if the judge's buffers show that no flush came before this call."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.sums: torch.Tensor | None = None

    def honest(self) -> bool:
        if self.sums is None:
            from attn_exp.timers.gpu import Cuda

            found = [one for one in gc.get_objects() if type(one) is Cuda]
            self.sums = found[0]._flush_sums if found else torch.zeros(1, device="cuda")
            self.sums.zero_()
        flushed = bool(self.sums[0].item() != 0)
        self.sums.zero_()
        return not flushed


@gpu_cheat("behaviour", "inaccurate", WRONG)
class HonestOnAnIdleDevice(_Sometimes):
    """Computes all of the batch only when the stream was idle before the call, as it is around untimed calls."""

    def honest(self) -> bool:
        return torch.cuda.current_stream().query()


class _Lazy(torch.Tensor):
    """An output that is computed when a function looks at it."""

    compute: Callable[[], object] | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            for one in args:
                if isinstance(one, cls) and one.compute is not None:
                    run, one.compute = one.compute, None
                    run()
            return func(*(_plain(one) for one in args), **(kwargs or {}))


def _plain(value: Any) -> Any:
    return value.as_subclass(torch.Tensor) if isinstance(value, _Lazy) else value


@gpu_cheat("laziness", _LAZY_STATUSES, any_of(_LAZY, WRONG, "kernel"), seen="flashinfer-bench#21")
class LazySubclassOnGpu(OnGpu):
    """Returns a subclass of torch.Tensor that computes half of the batch when it is first looked at."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        out, half = like_output(inputs), case.batch // 2

        def second() -> None:
            out[half:] = attend(case, *batches(case, inputs.qkv, half, case.batch))

        def forward() -> torch.Tensor:
            out[:half] = attend(case, *batches(case, inputs.qkv, 0, half))
            lazy = out.as_subclass(_Lazy)
            lazy.compute = second
            return lazy

        return forward


class _Pending:
    """The output that waits to be completed, and how."""

    def __init__(self) -> None:
        self.out: torch.Tensor | None = None
        self.run: Callable[[], object] | None = None

    def complete(self, values: Any) -> None:
        """Complete the output if it is among the values."""
        if self.run is not None and any(_shares(value, self.out) for value in values):
            run, self.run = self.run, None
            run()


def _shares(value: Any, out: torch.Tensor | None) -> bool:
    if not isinstance(value, torch.Tensor) or out is None or value.device != out.device:
        return False
    return value.untyped_storage()._cdata == out.untyped_storage()._cdata


class _FunctionMode(TorchFunctionMode):
    def __init__(self, pending: _Pending) -> None:
        super().__init__()
        self.pending = pending

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.pending.complete(args)
        return function(*args, **(kwargs or {}))


class _DispatchMode(TorchDispatchMode):
    def __init__(self, pending: _Pending) -> None:
        super().__init__()
        self.pending = pending

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.pending.complete(args)
        return function(*args, **(kwargs or {}))


class _LazyByMode(OnGpu):
    """Completes its output when the mode that its scope enters sees a function that looks at it."""

    mode: Any

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.pending = _Pending()

    @contextmanager
    def scope(self) -> Iterator[None]:
        with super().scope(), self.mode(self.pending):
            yield

    def make(self, case: Case, inputs: Inputs) -> Forward:
        out, half = like_output(inputs), case.batch // 2

        def second() -> None:
            out[half:] = attend(case, *batches(case, inputs.qkv, half, case.batch))

        def forward() -> torch.Tensor:
            self.pending.run = None
            first = attend(case, *batches(case, inputs.qkv, 0, half))
            out[:half] = first
            self.pending.out, self.pending.run = out, second
            return out

        return forward


@gpu_cheat("laziness", _LAZY_STATUSES, any_of(_LAZY, WRONG))
class LazyByFunctionMode(_LazyByMode):
    """Half of the batch is computed when a torch function looks at the output, by a TorchFunctionMode of its scope."""

    mode = _FunctionMode


@gpu_cheat("laziness", _LAZY_STATUSES, any_of(_LAZY, WRONG))
class LazyByDispatchMode(_LazyByMode):
    """Half of the batch is computed when an operator looks at the output, by a TorchDispatchMode of its scope."""

    mode = _DispatchMode
