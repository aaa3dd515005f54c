"""Attention of few queries over many keys, as in decoding: the keys of a head are split over programs, then merged.

One program computes all queries of all heads that share a key-value head, so that its keys are read once. Splitting
fills a GPU that has fewer key-value heads than processors, and merging weighs the parts by their sums of exponentials
(Flash-Decoding, https://pytorch.org/blog/flash-decoding/).
"""

import functools

import torch
import triton

from attn_exp.kernels.bounds import LOG2_E
from attn_exp.kernels.decode_kernels import decode_kernel, decode_merge_kernel
from attn_exp.kernels.launch import padded

# Queries of the heads that share a key-value head: more would not fit into the registers of one program.
LARGEST_ROWS = 64
# Fewer keys are not worth the merging.
LEAST_KEYS = 256
_BLOCK_N = 64
_MERGED_AT_ONCE = 16
_MOST_SPLITS = 64
# Programs for each processor.
_WAVES = 2


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@torch.library.custom_op("attn_exp::triton_decode", mutates_args=())
def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor | None,
    scale: float,
    v_scale: float,
    causal: bool,
    offset: int,
) -> torch.Tensor:
    """Compute softmax(scale * q kT) v * v_scale of few queries; forward only.

    Args:
        q: (batch, q_heads, q_len, head_dim), with at most `LARGEST_ROWS` queries of the heads that share a key.
        k: (batch, kv_heads, kv_len, head_dim), or with `slots` a pool (1, kv_heads, slots, head_dim).
        v: the same with value_dim. The last stride of each must be 1.
        slots: the place of each key in the pools, int32 (batch, kv_len), or None.
        scale: factor of the scores.
        v_scale: factor of the values.
        causal: query i sees only keys j <= i + offset.
        offset: the last key that query 0 sees.

    Returns:
        (batch, q_heads, q_len, value_dim), contiguous.
    """
    batch, q_heads, q_len, dim = q.shape
    kv_heads, value_dim = k.shape[1], v.shape[3]
    kv_len = k.shape[2] if slots is None else slots.shape[1]
    heads, rows = batch * kv_heads, q_heads // kv_heads * q_len
    wanted = min(_MOST_SPLITS, triton.cdiv(_WAVES * _processors(q.device), heads), triton.cdiv(kv_len, LEAST_KEYS))
    chunk = triton.cdiv(triton.cdiv(kv_len, wanted), _BLOCK_N) * _BLOCK_N
    splits = triton.cdiv(kv_len, chunk)
    parts = torch.empty(heads, splits, rows, value_dim, dtype=torch.float32, device=q.device)
    sums = torch.empty(heads, splits, rows, dtype=torch.float32, device=q.device)
    out = torch.empty(batch, q_heads, q_len, value_dim, dtype=q.dtype, device=q.device)
    sizes = {"kv_heads": kv_heads, "q_len": q_len, "GROUP": q_heads // kv_heads, "VALUE_DIM": value_dim}
    sizes["BLOCK_DV"] = padded(value_dim)
    with torch.cuda.device_of(q):
        decode_kernel[heads, splits](
            q, k, v, slots, parts, sums, q.stride()[:3], k.stride()[:3], v.stride()[:3],
            kv_len=kv_len, offset=offset, chunk=chunk, factor=scale * LOG2_E, DIM=dim, CAUSAL=causal,
            PAGED=slots is not None, BLOCK_D=padded(dim), BLOCK_M=max(16, triton.next_power_of_2(rows)),
            BLOCK_N=_BLOCK_N, num_warps=4, num_stages=3, **sizes,
        )  # fmt: skip
        decode_merge_kernel[(heads * rows,)](
            parts, sums, out, out.stride()[:3], splits=splits, v_scale=v_scale, BLOCK_S=_MERGED_AT_ONCE, num_warps=4,
            **sizes,
        )  # fmt: skip
    return out


@decode.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *slots_and_options: torch.Tensor | float | bool | None
) -> torch.Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])
