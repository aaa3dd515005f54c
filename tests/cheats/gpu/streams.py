"""Work that the stream of the call does not wait for, and work that is done between the calls."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from attn_exp.attention.autograd import Gradients
from attn_exp.attention.inputs import Inputs
from attn_exp.core.case import Case
from cheats.corpus import BOTH
from cheats.gpu.base import UNAWAITED, WRONG, Forward, OnGpu, any_of, attend, batches, gpu_cheat, like_output

_STATUSES = ("implausible", "inaccurate")
# Cycles by which a side stream is late. Else its work may be done in time, beside the call's own.
_LATE = 100_000
_WORDS = any_of(UNAWAITED, WRONG)


@gpu_cheat("streams", _STATUSES, _WORDS)
class MostOnASideStream(OnGpu):
    """All but one row of the batch is computed on a side stream that begins late and that nobody waits for."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        out, side, own = like_output(inputs), torch.cuda.Stream(), 1

        def forward() -> torch.Tensor:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(_LATE)
                out[own:] = attend(case, *batches(case, inputs.qkv, own, case.batch))
            out[:own] = attend(case, *batches(case, inputs.qkv, 0, own))
            return out

        return forward


@gpu_cheat("streams", (*_STATUSES, "wrong_kernel"), any_of(_WORDS, "kernel"), seen="tensara#238")
class AllOnASideStream(OnGpu):
    """All of the work is on a side stream that nobody waits for; the call's own stream clears one number."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        out, side, touched = like_output(inputs), torch.cuda.Stream(), torch.zeros(1, device=inputs.d_out.device)

        def forward() -> torch.Tensor:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                out.copy_(attend(case, *inputs.qkv))
            touched.zero_()
            return out

        return forward


@gpu_cheat("streams", _STATUSES, _WORDS)
class OnlyTheNextCallWaits(OnGpu):
    """All but one row of the batch is on a side stream, for which only the next call waits; two buffers take turns."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        side, own = torch.cuda.Stream(), 1
        outs = [like_output(inputs), like_output(inputs)]

        def forward() -> torch.Tensor:
            stream = torch.cuda.current_stream()
            stream.wait_stream(side)
            side.wait_stream(stream)
            outs.reverse()
            out = outs[0]
            with torch.cuda.stream(side):
                torch.cuda._sleep(_LATE)
                out[own:] = attend(case, *batches(case, inputs.qkv, own, case.batch))
            out[:own] = attend(case, *batches(case, inputs.qkv, 0, own))
            return out

        return forward


@gpu_cheat("streams", _STATUSES, _WORDS)
class WaitsForTheWrongEvent(OnGpu):
    """All but one row of the batch is on a side stream; the call waits for an event recorded before that work."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        out, side, own = like_output(inputs), torch.cuda.Stream(), 1
        done = torch.cuda.Event()

        def forward() -> torch.Tensor:
            stream = torch.cuda.current_stream()
            side.wait_stream(stream)
            with torch.cuda.stream(side):
                done.record(side)
                torch.cuda._sleep(_LATE)
                out[own:] = attend(case, *batches(case, inputs.qkv, own, case.batch))
            out[:own] = attend(case, *batches(case, inputs.qkv, 0, own))
            stream.wait_event(done)
            return out

        return forward


@gpu_cheat("streams", _STATUSES, _WORDS, passes=BOTH)
class DqOnASideStream(OnGpu):
    """The backward copies dq from a side stream that nobody waits for."""

    def gradients(self, case: Case, inputs: Inputs, right: Callable[[], Gradients]) -> Callable[[], Gradients]:
        side, kept = torch.cuda.Stream(), torch.zeros_like(inputs.q_bhsd)
        size = 2048 if kept.is_cuda else 8
        busy = torch.randn(size, size, device=kept.device, dtype=kept.dtype)

        def backward() -> Gradients:
            dq, dk, dv = right()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                # Work as long as another backward, so that the copy comes clearly too late.
                for _ in range(8):
                    torch.matmul(busy, busy)
                kept.copy_(dq)
            dq.record_stream(side)
            return kept, dk, dv

        return backward


@gpu_cheat("streams", _STATUSES, _WORDS, seen="wafer")
class LaunchedByAThreadLater(OnGpu):
    """A host thread launches half of the batch on the call's stream, two milliseconds after the call has returned."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        out, half, pool = like_output(inputs), case.batch // 2, ThreadPoolExecutor(1)
        pending: list[Future[None]] = []

        def later(stream: torch.cuda.Stream) -> None:
            time.sleep(0.002)
            with torch.no_grad(), torch.cuda.stream(stream):
                out[half:] = attend(case, *batches(case, inputs.qkv, half, case.batch))

        def forward() -> torch.Tensor:
            out[:half] = attend(case, *batches(case, inputs.qkv, 0, half))
            # At most one waits, so that none is left for the jobs after this one.
            if not pending or pending[-1].done():
                pending[:] = [pool.submit(later, torch.cuda.current_stream())]
            return out

        return forward


@gpu_cheat("streams", (*_STATUSES, "wrong_kernel"), any_of(_WORDS, "kernel"), seen="wafer")
class ComputedByAThread(OnGpu):
    """A host thread computes on a stream of its own; the call returns the buffer at once."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        out, side, pool = attend(case, *inputs.qkv), torch.cuda.Stream(), ThreadPoolExecutor(1)
        pending: list[Future[None]] = []

        def work() -> None:
            with torch.no_grad(), torch.cuda.stream(side):
                out.copy_(attend(case, *inputs.qkv))

        def forward() -> torch.Tensor:
            if not pending or pending[-1].done():
                pending[:] = [pool.submit(work)]
            return out

        return forward


class _Flushes(TorchFunctionMode):
    """Does what is pending when somebody reads a large buffer into given sums: the flush of the caches."""

    def __init__(self, pending: list[Callable[[], object]]) -> None:
        super().__init__()
        self.pending = pending

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.sum and "out" in (kwargs or {}):
            while self.pending:
                self.pending.pop()()
        return function(*args, **(kwargs or {}))


@gpu_cheat("streams", (*_STATUSES, "error"), any_of(_WORDS, "mode"))
class TailInTheFlush(OnGpu):
    """Half of the batch is computed when the next flush of the caches is called, outside of the timed region."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.pending: list[Callable[[], object]] = []

    @contextmanager
    def scope(self) -> Iterator[None]:
        with super().scope(), _Flushes(self.pending):
            yield

    def make(self, case: Case, inputs: Inputs) -> Forward:
        out, half, calls = attend(case, *inputs.qkv), case.batch // 2, [0]

        def second_half() -> None:
            out[half:] = attend(case, *batches(case, inputs.qkv, half, case.batch))

        def forward() -> torch.Tensor:
            out[:half] = attend(case, *batches(case, inputs.qkv, 0, half))
            calls[0] += 1
            if calls[0] == 1:
                second_half()
            else:
                self.pending[:] = [second_half]
            return out

        return forward
