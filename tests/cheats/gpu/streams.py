"""Work that the stream of the call does not wait for, and work that is done between the calls."""

from collections.abc import Callable

import torch

from attn_exp.attention.inputs import Gradients, Inputs
from attn_exp.core.case.case import Case
from cheats.corpus import BOTH
from cheats.gpu.base import UNAWAITED, WRONG, Forward, OnGpu, any_of, attend, gpu_cheat, like_output

_STATUSES = ("implausible", "inaccurate")
_WORDS = any_of(UNAWAITED, WRONG)


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
