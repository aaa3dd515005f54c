"""What ends or poisons the process that it runs in: each of these needs a worker of its own."""

import itertools

import torch

from attn_exp.attention.inputs import Inputs
from attn_exp.core.case.case import Case
from cheats.gpu.base import SHORT, Forward, OnGpu, attend, gpu_cheat

_HONEST_CALLS = 4


@gpu_cheat("bad input", "error", r"cuda|assert|illegal|device", case=SHORT, worker=True)
class AssertsLater(OnGpu):
    """A device-side assert after the first calls, which leaves the device unusable for this process."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        calls, few = itertools.count(), torch.zeros(4, device=inputs.d_out.device)

        def forward() -> torch.Tensor:
            if next(calls) == _HONEST_CALLS:
                few[torch.tensor([1 << 20], device=few.device)]
            return attend(case, *inputs.qkv)

        return forward
