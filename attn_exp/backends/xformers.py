"""xFormers' `memory_efficient_attention` with one operator forced: CUTLASS or FlashAttention 3."""

import importlib
from dataclasses import replace
from functools import lru_cache, partial
from types import ModuleType
from typing import Any

import torch

from attn_exp.attention.inputs import Inputs
from attn_exp.backends.base import FUSED_SHARE, Calls, DeclarativeBackend
from attn_exp.backends.bshd import AttentionOptions, bshd_calls, operator_attention, register
from attn_exp.backends.fa3 import left_out_of_build
from attn_exp.backends.package import Package, Unavailable
from attn_exp.backends.supports import Supports
from attn_exp.core.case.case import Case

# If only flash-attn-4 is installed beside it, xFormers cannot be imported: it takes that package's folder for
# flash-attn.
PACKAGE = Package("xformers", "xformers.ops.fmha", 'pip install "xformers>=0.0.35,<0.1"')


class XformersCutlass(DeclarativeBackend):
    """xFormers' `memory_efficient_attention` forced to CUTLASS; since 0.0.35 these are PyTorch's own kernels.

    Run on an H200 with 0.0.35 (xformers/ops/fmha/cutlass.py, attn_bias.py). Its wheel is built for CUDA 12: with a CUDA
    13 build of torch its extension needs `libcudart.so.12` (nvidia-cuda-runtime-cu12) on the library path. Its grouped
    heads are experimental and have no backward, and a sliding window has a backward only for packed sequences: both are
    refused.
    """

    supports = Supports(
        dtypes=("bfloat16", "float16", "float32"),
        grouped=False,
        features=("packed",),
        value_dims="any",
        # check_lastdim_alignment_stride1 with 16 bytes of a 16-bit type.
        head_dim_multiple=8,
        # bfloat16 needs 8.0; CUDA_MAXIMUM_COMPUTE_CAPABILITY is 9.0.
        capabilities=(8, 9),
    )
    package = PACKAGE
    claimed_share = FUSED_SHARE
    claims = {("cuda", "forward"): r"fmha_cutlassF", ("cuda", "backward"): r"fmha_cutlassB"}

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Build xFormers' mask object once, untimed."""
        fmha = loaded("cutlass")
        # The mask of a decode step hides nothing, and a window that hides nothing would have no backward.
        bias = None
        if not case.dense:
            bias = attention_bias(
                fmha, case.lengths or (), inputs.q_bhsd.device, causal=case.causal, window=case.window, align=case.align
            )
        forced = (fmha.cutlass.FwOp, fmha.cutlass.BwOp)
        return bshd_calls(partial(fmha.memory_efficient_attention, attn_bias=bias, op=forced), inputs)


class XformersFlash3(DeclarativeBackend):
    """xFormers forced to FlashAttention 3, as a custom operator that breaks no graph under torch.compile.

    Run on an H100 with 0.0.35 (xformers/ops/fmha/flash3.py) and flash_attn_3 as `fa3` names it: xFormers calls that
    where it is installed. Its grouped heads are experimental and have no backward: they are refused.
    """

    supports = Supports(
        align=("bottom_right",),
        grouped=False,
        masks=("window",),
        features=("packed",),
        # SUPPORTED_MIN_K of the backward and SUPPORTED_MAX_K; FlashAttention 3 rounds up to these.
        head_dims=(64, 96, 128, 192, 256),
        value_dims=((192, 128), (64, 128), (64, 256)),
        # xFormers allows 8.x, but FlashAttention 3 is for Hopper.
        capabilities=(9,),
    )
    package = replace(PACKAGE, install=f"{PACKAGE.install}, and flash_attn_3 as for backend=fa3")
    claimed_share = FUSED_SHARE
    claims = {("cuda", "forward"): r"FlashAttnFwdSm", ("cuda", "backward"): r"FlashAttnBwdSm"}

    def unsupported(self, case: Case, device: str) -> str | None:
        """Also refuse what the installed flash_attn_3 was built without."""
        return super().unsupported(case, device) or left_out_of_build(case)

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Return the calls; the mask is built at the first call and kept."""
        loaded("flash3")
        return bshd_calls(operator_attention(XFORMERS_FA3, case, inputs), inputs)


def loaded(operator: str) -> ModuleType:
    """Return `xformers.ops.fmha`, with its `cutlass` or `flash3` operator built and its extension loaded.

    Raises Unavailable if a part is missing. Without its extension xFormers only warns, and refuses every call.
    """
    fmha = PACKAGE.load()
    failed = importlib.import_module("xformers._cpp_lib")._cpp_library_load_exception
    if failed is not None:
        built = " ".join(str(failed).split()).split(" Please reinstall")[0]
        raise Unavailable(f"xformers {PACKAGE.version()}: {built}")
    if not getattr(fmha, operator).FwOp.is_available():
        needed = {"flash3": ": it needs flash_attn_3, built from flash-attention's folder hopper (see backend=fa3)"}
        raise Unavailable(f"xformers {PACKAGE.version()} has no {operator} here{needed.get(operator, '')}")
    return fmha


def attention_bias(
    fmha: ModuleType,
    lengths: tuple[int, ...],
    device: torch.device,
    *,
    causal: bool,
    window: int | None,
    align: str = "bottom_right",
) -> Any:
    """Return a case's mask as xFormers' object. Its windows count the query's own key, as a case's do."""
    masks = fmha.attn_bias
    if lengths:
        blocks = masks.BlockDiagonalMask.from_seqlens(list(lengths), device=device)
        if window is not None:
            return blocks.make_local_attention(window)
        return blocks.make_causal() if causal else blocks
    if window is not None:
        return masks.LowerTriangularFromBottomRightLocalAttentionMask(window)
    if causal:
        return masks.LowerTriangularFromBottomRightMask() if align == "bottom_right" else masks.LowerTriangularMask()
    return None


@lru_cache(maxsize=8)
def _kept_bias(
    fmha: ModuleType, lengths: tuple[int, ...], device: torch.device, causal: bool, window: int | None
) -> Any:
    """Return a cached mask: operators take no objects, and building it copies lengths to the GPU."""
    return attention_bias(fmha, lengths, device, causal=causal, window=window)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    fmha = PACKAGE.load()
    bias = _kept_bias(fmha, options.lengths, q.device, options.causal, options.window)
    out, lse = fmha.memory_efficient_attention_forward_requires_grad(q, k, v, bias, op=fmha.flash3.FwOp)
    return out, lse


def _backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    fmha = PACKAGE.load()
    bias = _kept_bias(fmha, options.lengths, q.device, options.causal, options.window)
    dq, dk, dv = fmha.memory_efficient_attention_backward(d_out, out, lse, q, k, v, bias, op=fmha.flash3.BwOp)
    return dq, dk, dv


XFORMERS_FA3 = register("xformers_fa3", _forward, _backward)
