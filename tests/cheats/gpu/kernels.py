"""Other kernels than the claimed ones."""

from contextlib import AbstractContextManager
from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel

from cheats.gpu.base import CLAIM, OnGpu, gpu_cheat


@gpu_cheat("kernels", "wrong_kernel", CLAIM)
class ClaimsAnother(OnGpu):
    """Claims cuDNN's kernel and runs FlashAttention 2's."""

    claim = r"cudnn.*sdpa"


@gpu_cheat("kernels", "wrong_kernel", CLAIM)
class FallsBackInSilence(OnGpu):
    """Claims FlashAttention 2, and leaves PyTorch to choose among the others."""

    claim = r"flash_fwd"

    def scope(self) -> AbstractContextManager[Any]:
        return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
