"""FlashAttention 3 for Hopper: `flash_attn_interface` from the folder `hopper` of flash-attention."""

import importlib

import torch

from attn_exp.attention.inputs import Inputs
from attn_exp.backends.base import FUSED_SHARE, Calls, Reproducible
from attn_exp.backends.bshd import AttentionOptions, bshd_calls, flash_window, operator_attention, register
from attn_exp.backends.package import Package
from attn_exp.backends.supports import Supports
from attn_exp.core.case.case import E4M3, Case

PACKAGE = Package(
    "flash_attn_3",
    "flash_attn_interface",
    "git clone --recursive https://github.com/Dao-AILab/flash-attention && cd flash-attention/hopper && "
    "python setup.py install (CUDA 12.3 or newer; it is not on PyPI)",
)


# Head dimensions are rounded up to the next of these that a build has (hopper/flash_api.cpp, round_up_headdim).
_ROUNDED_TO = (64, 96, 128, 192, 256)


def left_out_of_build(case: Case) -> str | None:
    """Return what a case needs that the installed flash_attn_3 was built without, None if nothing.

    The library does not refuse most of it: it ends in a segmentation fault. `setup.py` writes the flags of a build into
    `flash_attn_config`; those of a build without that module are not known.
    """
    try:
        built = importlib.import_module("flash_attn_config").CONFIG["build_flags"]
    except (ImportError, AttributeError, KeyError):
        return None
    left_out = {name.rpartition("DISABLE_")[2] for name, is_left_out in built.items() if is_left_out}
    largest = max((dim for dim in _ROUNDED_TO if f"HDIM{dim}" not in left_out), default=0)
    unequal_flag = f"HDIMDIFF{192 if case.head_dim > 128 else 64}"
    needs = {
        f"head dimensions above {largest}": max(case.head_dim, case.value_dim) > largest,
        "different head dimensions of keys and values": case.head_dim != case.value_dim and unequal_flag in left_out,
        "softcap": case.softcap is not None and "SOFTCAP" in left_out,
        "sliding windows": case.window is not None and "LOCAL" in left_out,
        "packed sequences": case.lengths is not None and "VARLEN" in left_out,
        "float16": case.dtype == "float16" and "FP16" in left_out,
        "fp8": case.in_codes and "FP8" in left_out,
    }
    lacking = next((what for what, needed in needs.items() if needed), None)
    return lacking and f"the installed flash_attn_3 was built without {lacking}"


class FlashAttention3(Reproducible):
    """FlashAttention 3, for Hopper, as a custom operator that breaks no graph under torch.compile.

    It is not on the package index. Run on an H200 with 3.0.0 at commit 0251105 of Dao-AILab/flash-attention, built for
    head dimensions of 64 and 128 without softcap. The rest is written against commit 01afd16
    (hopper/flash_attn_interface.py, flash_api_stable.cpp). `deterministic` selects the backward that sums in a fixed
    order. At fp8 the output is bfloat16, and there are no gradients.
    """

    # hopper/flash_api_stable.cpp, mha_fwd and mha_bwd: head dimensions up to 256. They may differ as (128, 192] with
    # (96, 128], or up to 64 with up to 512, which is not declared here: the backward
    # supports up to 256.
    supports = Supports(
        dtypes=("bfloat16", "float16", E4M3),
        # mha_bwd supports only half precision.
        forward_only=(E4M3,),
        align=("bottom_right",),
        masks=("window",),
        features=("softcap", "packed"),
        # "If the row of the mask is all zero, the output will be zero."
        keyless=True,
        largest_head_dim=256,
        head_dim_multiple=8,
        value_dims=((192, 128), (64, 128), (64, 256)),
        capabilities=(9,),
    )
    package = PACKAGE
    claimed_share = FUSED_SHARE
    claims = {("cuda", "forward"): r"FlashAttnFwdSm", ("cuda", "backward"): r"FlashAttnBwdSm"}

    def unsupported(self, case: Case, device: str) -> str | None:
        """Also refuse what its build lacks, odd heads at fp8, and a deterministic backward of 256 channels."""
        refusal = super().unsupported(case, device)
        odd = [dim for dim in (case.head_dim, case.value_dim) if case.in_codes and dim % 16]
        if refusal is None and odd:
            return f"{self.name} needs head dimensions that are multiples of 16 at {case.dtype}, not {odd[0]}"
        if refusal is None and self.deterministic and max(case.head_dim, case.value_dim) > 192:
            return f"{self.name} has no deterministic backward for head dimensions above 192: set deterministic=false"
        return refusal or left_out_of_build(case)

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Build the sequence starts once, untimed."""
        self.package.load()
        attention = operator_attention(FA3, case, inputs, deterministic=self.deterministic)
        return bshd_calls(attention, inputs)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    packed = options.starts is not None
    left, right = flash_window(causal=options.causal, window=options.window)
    longest = max(options.lengths) if packed else None
    q_descale, k_descale, v_descale = (None, None, None) if options.descales is None else options.descales
    out, lse, *_ = PACKAGE.load()._flash_attn_forward(
        *((q[0], k[0], v[0]) if packed else (q, k, v)),
        cu_seqlens_q=options.starts,
        cu_seqlens_k=options.starts,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        softmax_scale=q.shape[-1] ** -0.5,
        causal=options.causal,
        window_size_left=left,
        window_size_right=right,
        softcap=options.softcap or 0.0,
    )
    return (out.unsqueeze(0), lse.unsqueeze(0)) if packed else (out, lse)


def _backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    packed = options.starts is not None
    left, right = flash_window(causal=options.causal, window=options.window)
    longest = max(options.lengths) if packed else None
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    def rows(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[0] for tensor in tensors) if packed else tensors

    into = dict(zip(("dq", "dk", "dv"), rows(dq, dk, dv), strict=True))
    # It writes into dq, dk and dv; its return value differs between versions.
    PACKAGE.load()._flash_attn_backward(
        *rows(d_out, q, k, v, out, lse),
        cu_seqlens_q=options.starts,
        cu_seqlens_k=options.starts,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        **into,
        softmax_scale=q.shape[-1] ** -0.5,
        is_causal=options.causal,
        window_size_left=left,
        window_size_right=right,
        softcap=options.softcap or 0.0,
        deterministic=options.deterministic,
    )
    return dq, dk, dv


FA3 = register("fa3", _forward, _backward)
