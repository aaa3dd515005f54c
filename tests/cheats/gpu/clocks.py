"""Clocks, waits and the profiler, replaced in the process that measures."""

from dataclasses import replace
from typing import Any

import torch

from attn_exp.attention.inputs import Inputs
from attn_exp.core.case import Case
from cheats.gpu.base import CLAIM, REPLACED, Forward, OnGpu, any_of, attend, gpu_cheat
from cheats.ways import patch


@gpu_cheat("clock", "implausible", REPLACED, seen="reference-kernels#102")
class HalvedElapsedTime(OnGpu):
    """Replaces `Event.elapsed_time` by half of it."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        elapsed = torch.cuda.Event.elapsed_time
        patch(torch.cuda.Event, "elapsed_time", lambda self, end: elapsed(self, end) / 2)
        return super().make(case, inputs)


@gpu_cheat("clock", "implausible", REPLACED)
class EventsOnAnIdleStream(OnGpu):
    """Replaces `Event.record`, so that events are recorded on a stream without work."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        record, idle = torch.cuda.Event.record, torch.cuda.Stream()
        patch(torch.cuda.Event, "record", lambda self, stream=None: record(self, idle))
        return super().make(case, inputs)


# Without a check of the functions the first clock that is read too early raises.
@gpu_cheat("clock", ("implausible", "error"), any_of(REPLACED, "not ready"))
class SynchronizeThatReturns(OnGpu):
    """Replaces `torch.cuda.synchronize` by nothing."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        patch(torch.cuda, "synchronize", lambda device=None: None)
        return super().make(case, inputs)


@gpu_cheat("clock", "implausible", REPLACED, timer="wall")
class WallWithoutWaiting(OnGpu):
    """Replaces `torch.cuda.synchronize` by nothing, for the timer that waits for the device."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        patch(torch.cuda, "synchronize", lambda device=None: None)
        return super().make(case, inputs)


@gpu_cheat("clock", ("implausible", "error"), any_of(REPLACED, "not ready"))
class EventSynchronizeThatReturns(OnGpu):
    """Replaces `Event.synchronize` by nothing."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        patch(torch.cuda.Event, "synchronize", lambda self: None)
        return super().make(case, inputs)


@gpu_cheat("clock", ("implausible", "wrong_kernel"), any_of(REPLACED, CLAIM))
class RenamesWhatTheProfilerSaw(OnGpu):
    """Replaces the function that reads the trace, so that every kernel has the claimed name."""

    claim = r"^fused_attention"

    def make(self, case: Case, inputs: Inputs) -> Forward:
        from attn_exp.timers import trace
        from attn_exp.timers.gpu import MARK

        read = trace.activities

        def renamed(*arguments: Any, **options: Any) -> Any:
            return [
                activity if MARK in activity.name else replace(activity, name="fused_attention")
                for activity in read(*arguments, **options)
            ]

        patch(trace, "activities", renamed)
        return lambda: attend(case, *inputs.qkv)


@gpu_cheat("clock", ("implausible", "wrong_kernel"), any_of(REPLACED, CLAIM))
class ProfilerThatRunsTheClaim(OnGpu):
    """Replaces the profiler's beginning, so that it knows when to run the kernel that it claims."""

    claim = r"flash_fwd"

    def make(self, case: Case, inputs: Inputs) -> Forward:
        profile, watched = torch.autograd.profiler.profile, [False]
        begin, end = profile.__enter__, profile.__exit__

        def watched_begin(self: Any) -> Any:
            watched[0] = True
            return begin(self)

        def watched_end(self: Any, *raised: Any) -> Any:
            watched[0] = False
            return end(self, *raised)

        patch(profile, "__enter__", watched_begin)
        patch(profile, "__exit__", watched_end)

        def forward() -> torch.Tensor:
            if watched[0]:
                return attend(case, *inputs.qkv)
            q, k, v = inputs.qkv
            return torch.softmax(q @ k.mT * case.head_dim**-0.5, -1) @ v

        return forward
