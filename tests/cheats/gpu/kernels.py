"""Other kernels than the claimed ones."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_exp.attention.inputs import Inputs
from attn_exp.core.case import Case
from cheats.gpu.base import CLAIM, Forward, OnGpu, attend, batches, gpu_cheat


def formula_of(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return the formula in the tensors' dtype: matrix products and a softmax."""
    return torch.softmax(q @ k.mT * case.head_dim**-0.5, -1) @ v


@gpu_cheat("kernels", "wrong_kernel", CLAIM)
class ClaimsAnother(OnGpu):
    """Claims cuDNN's kernel and runs FlashAttention 2's."""

    claim = r"cudnn.*sdpa"


@gpu_cheat("kernels", "wrong_kernel", CLAIM)
class TinyKernelForTheClaim(OnGpu):
    """Runs the claimed kernel on 16 tokens, and computes the output by the formula."""

    claim = r"flash_fwd"

    def make(self, case: Case, inputs: Inputs) -> Forward:
        def forward() -> torch.Tensor:
            attend(case, *(tensor[:1, :1, :16] for tensor in inputs.qkv))
            return formula_of(case, *inputs.qkv)

        return forward


@gpu_cheat("kernels", "wrong_kernel", CLAIM)
class HalfByTheClaim(OnGpu):
    """Runs the claimed kernel for half of the batch, and the formula for the other half."""

    claim = r"flash_fwd"

    def make(self, case: Case, inputs: Inputs) -> Forward:
        half = case.batch // 2

        def forward() -> torch.Tensor:
            first = attend(case, *batches(case, inputs.qkv, 0, half))
            return torch.cat([first, formula_of(case, *batches(case, inputs.qkv, half, case.batch))])

        return forward


@gpu_cheat("kernels", "wrong_kernel", CLAIM)
class NamedAsTheClaim(OnGpu):
    """A Triton kernel that adds zero to one number has the claimed name; the formula does the work."""

    claim = r"flash_fwd"

    def make(self, case: Case, inputs: Inputs) -> Forward:
        from cheat_kernels import flash_fwd_splitkv

        one = torch.zeros(1, device=inputs.d_out.device)

        def forward() -> torch.Tensor:
            flash_fwd_splitkv[(1,)](one)
            return formula_of(case, *inputs.qkv)

        return forward


@gpu_cheat("kernels", "wrong_kernel", CLAIM)
class FallsBackInSilence(OnGpu):
    """Claims FlashAttention 2, and leaves PyTorch to choose among the others."""

    claim = r"flash_fwd"

    def scope(self) -> AbstractContextManager[Any]:
        return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


@gpu_cheat("kernels", "wrong_kernel", CLAIM)
class ForgesTheMarks(OnGpu):
    """Claims cuDNN's kernel, runs FlashAttention 2's, and launches what the judge marks its traces with."""

    claim = r"cudnn.*sdpa"

    def make(self, case: Case, inputs: Inputs) -> Forward:
        def forward() -> torch.Tensor:
            torch.cuda._sleep(1)
            return attend(case, *inputs.qkv)

        return forward
