"""What ends or poisons the process that it runs in: each of these needs a worker of its own."""

import itertools
import time

import torch

from attn_exp.attention.inputs import Inputs
from attn_exp.core.case import Case
from cheats.gpu.base import SHORT, Forward, OnGpu, attend, gpu_cheat

_HONEST_CALLS = 4
_BOUND_S = 60.0


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


@gpu_cheat(
    "bad input",
    ("error", "inaccurate", "crashed"),
    r"cuda|illegal|storage|data|signal|out",
    case=SHORT,
    worker=True,
)
class FreesItsInputsOnGpu(OnGpu):
    """Frees the memory of v after the first calls."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        calls = itertools.count()

        def forward() -> torch.Tensor:
            out = attend(case, *inputs.qkv)
            if next(calls) == _HONEST_CALLS:
                inputs.v_bhsd.untyped_storage().resize_(0)
            return out

        return forward


@gpu_cheat("bad input", "timeout", r"timeout|longer|seconds|limit", case=SHORT, worker=True)
class WaitsForEverOnNewInputs(OnGpu):
    """Waits on the host for the first inputs to come back, as soon as they have changed; a minute at most."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        first = [tensor.detach().clone() for tensor in inputs.qkv]

        def forward() -> torch.Tensor:
            began = time.monotonic()
            while not all(torch.equal(one, other) for one, other in zip(first, inputs.qkv, strict=True)):
                if time.monotonic() - began > _BOUND_S:
                    raise RuntimeError("the first inputs did not come back")
                time.sleep(0.01)
            return attend(case, *inputs.qkv)

        return forward


@gpu_cheat("bad input", "crashed", r"signal|SIGKILL|killed|died|ended|exit", case=SHORT, worker=True)
class KillsItsProcessOnGpu(OnGpu):
    """Ends the process after the first calls, as a native library does that aborts."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        calls = itertools.count()

        def forward() -> torch.Tensor:
            if next(calls) == _HONEST_CALLS:
                import os
                import signal

                os.kill(os.getpid(), signal.SIGABRT)
            return attend(case, *inputs.qkv)

        return forward
