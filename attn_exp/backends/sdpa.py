"""PyTorch's `scaled_dot_product_attention`, its own choice of kernel or one of its backends forced."""

import re
import warnings
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_exp.backends.base import Calls, calls_of
from attn_exp.case import Case
from attn_exp.inputs import Inputs

# What PyTorch says of the backends that were not asked for.
_OTHERS = re.compile(r"(not used because:|has been runtime disabled\.)$")


class Sdpa:
    """SDPA's own choice (`auto`): nothing is forced, no kernel is claimed, and the record shows what it took."""

    choice: SDPBackend | None = None
    # What names the pass's main kernel, by device and pass.
    claims: dict[tuple[str, str], str] = {}

    def __init__(self, name: str) -> None:
        self.name = name

    def unsupported(self, case: Case, device: str) -> str | None:
        """SDPA's causal mask is aligned top-left; the rest is asked of PyTorch itself, in its own words."""
        if case.causal and not case.square and case.align != "top_left":
            return "SDPA's is_causal aligns the mask top-left: set align=top_left"
        if case.window is not None:
            return "SDPA has no sliding window: set window=null, or use backend=eager"
        if self.choice is None:
            return None
        return self._refusal(case, device)

    def _refusal(self, case: Case, device: str) -> str | None:
        raise NotImplementedError(f"{type(self).__name__} forces a choice and must say what it refuses")

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """The SDPA call with the choice forced around it, not inside it."""
        attention = partial(
            F.scaled_dot_product_attention, is_causal=case.causal, enable_gqa=case.q_heads != case.kv_heads
        )
        return calls_of(attention, inputs, self._scope)

    def _scope(self) -> AbstractContextManager[Any]:
        if self.choice is None:
            # Not nullcontext: an outer choice must not leak into "its own choice".
            return sdpa_kernel(
                [
                    SDPBackend.CUDNN_ATTENTION,
                    SDPBackend.FLASH_ATTENTION,
                    SDPBackend.EFFICIENT_ATTENTION,
                    SDPBackend.MATH,
                ]
            )
        return sdpa_kernel(self.choice)

    def claimed_kernels(self, direction: str, device: str) -> str | None:
        """The pattern of the pass's main kernel, or operator on a CPU."""
        return self.claims.get((device, direction))


class Flash(Sdpa):
    """FlashAttention 2 as it ships with PyTorch; on a CPU PyTorch's own flash kernel."""

    choice = SDPBackend.FLASH_ATTENTION
    claims = {
        ("cuda", "forward"): r"flash_fwd",
        ("cuda", "backward"): r"flash_bwd",
        ("cpu", "forward"): r"_scaled_dot_product_flash_attention_for_cpu$",
        ("cpu", "backward"): r"_scaled_dot_product_flash_attention_for_cpu_backward$",
    }

    def _refusal(self, case: Case, device: str) -> str | None:
        if device == "cpu":
            return _cpu_flash_refusal(case)
        return _ask(can_use_flash_attention, SDPBackend.FLASH_ATTENTION, case)


class Efficient(Sdpa):
    """The memory-efficient attention that PyTorch took over from xFormers (CUTLASS)."""

    choice = SDPBackend.EFFICIENT_ATTENTION
    claims = {
        ("cuda", "forward"): r"fmha_cutlassF",
        ("cuda", "backward"): r"fmha_cutlassB",
    }

    def _refusal(self, case: Case, device: str) -> str | None:
        if device == "cpu":
            return "memory-efficient attention has no CPU kernel: use backend=flash, math, auto or eager"
        return _ask(can_use_efficient_attention, SDPBackend.EFFICIENT_ATTENTION, case)


class Cudnn(Sdpa):
    """cuDNN's fused attention, forced through SDPA."""

    choice = SDPBackend.CUDNN_ATTENTION
    claims = {
        ("cuda", "forward"): r"cudnn.*(sdpa|flash|mha).*(fprop|fwd|forward)|cudnn_generated_fort_native_sdpa.*fprop",
        ("cuda", "backward"): r"cudnn.*(sdpa|flash|mha).*(bprop|bwd|backward)|cudnn_generated_fort_native_sdpa.*bprop",
    }

    def _refusal(self, case: Case, device: str) -> str | None:
        if device == "cpu":
            return "cuDNN runs on NVIDIA GPUs alone: use backend=flash, math, auto or eager on a CPU"
        return _ask(can_use_cudnn_attention, SDPBackend.CUDNN_ATTENTION, case)


class Math(Sdpa):
    """SDPA's unfused formula: two matrix products and a softmax, every intermediate in memory."""

    choice = SDPBackend.MATH
    claims = {
        ("cuda", "forward"): r"(?i)softmax",
        ("cuda", "backward"): r"(?i)softmax",
        ("cpu", "forward"): r"_scaled_dot_product_attention_math",
        ("cpu", "backward"): r"_softmax_backward_data",
    }

    def _refusal(self, case: Case, device: str) -> str | None:
        return None


def _cpu_flash_refusal(case: Case) -> str | None:
    # aten/src/ATen/native/transformers/sdp_utils_cpp.cpp, use_flash_attention_cpp
    if case.head_dim != case.value_dim:
        return f"PyTorch's CPU flash attention needs equal head dimensions, not {case.head_dim} and {case.value_dim}"
    return None


def _ask(can_use: Any, choice: SDPBackend, case: Case) -> str | None:
    """PyTorch's reasons for refusing, in its own words; tensors of the case's shapes are made and never read."""
    dtype: torch.dtype = getattr(torch, case.dtype)

    def empty(heads: int, length: int, dim: int) -> torch.Tensor:
        return torch.empty(case.batch, heads, length, dim, dtype=dtype, device="cuda", requires_grad=True)

    q = empty(case.q_heads, case.q_len, case.head_dim)
    k = empty(case.kv_heads, case.kv_len, case.head_dim)
    v = empty(case.kv_heads, case.kv_len, case.value_dim)
    grouped = case.q_heads != case.kv_heads
    if can_use(SDPAParams(q, k, v, None, 0.0, case.causal, grouped), False):
        return None
    # The reasons come as Python warnings from the call alone; can_use_* prints them past Python (torch 2.11).
    with warnings.catch_warnings(record=True) as caught, sdpa_kernel(choice):
        warnings.simplefilter("always")
        try:
            F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=grouped)
        except RuntimeError as error:
            # "... (Triggered internally at <file>:<line>.)" says where in PyTorch, not why.
            reasons = [str(warning.message).split(" (Triggered internally")[0].strip() for warning in caught]
            return " ".join(reason for reason in reasons if not _OTHERS.search(reason)) or str(error)
    return None
