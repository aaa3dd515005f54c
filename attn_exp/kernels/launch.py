"""Launch the kernels: their arguments, and how they read memory."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from attn_exp.kernels import tuning
from attn_exp.kernels.backward_kernels import dkdv_kernel, dq_kernel, rows_kernel
from attn_exp.kernels.bounds import LOG2_E, Added, Bounds
from attn_exp.kernels.forward_kernel import forward_kernel

ROWS_BLOCK = 64
# Columns of dk and dv that one program sums. At head_dim 256 two kernels with 5 products are faster than one with 4.
WIDEST_SUMS = 256


@dataclass(frozen=True)
class Scores:
    """How scores follow from q kT: scale, softcap, what is added, and mask.

    Query i sees keys i + offset - window < j <= i + offset, or those of `bounds`.

    `window`, `softcap` and `bounds` are None for none; without `causal`, offset and window are unused.
    """

    scale: float
    causal: bool
    offset: int
    window: int | None
    softcap: float | None
    bounds: Bounds | None = None
    added: Added = field(default_factory=Added)

    @property
    def mask(self) -> tuple[int, ...]:
        """Return numbers that differ between masks of the same lengths."""
        if self.bounds is not None:
            return (self.bounds.pairs,)
        return (self.offset, self.window or 0) if self.causal else ()

    def kernel_arguments(self) -> dict[str, Any]:
        """Return the kernels' arguments; `inner` and `outer` fold scale and softcap into one factor each."""
        cap, bias = self.softcap, self.added.bias
        shared = bias is not None and bias.shape[1] == 1
        return {
            "inner": 1.0 if cap is None else self.scale / cap,
            "outer": (self.scale if cap is None else cap) * LOG2_E,
            "offset": self.offset if self.causal else 0,
            "window": self.window or 0,
            "CAUSAL": self.causal,
            "WINDOWED": self.window is not None,
            "key_bounds": None if self.bounds is None else self.bounds.keys,
            "bounds_len": 0 if self.bounds is None else self.bounds.keys.shape[1],
            "BOUNDED": self.bounds is not None,
            "SOFTCAPPED": cap is not None,
            "slopes_log2": self.added.slopes_log2,
            "own_keys": self.added.own_keys,
            "ALIBI": self.added.slopes_log2 is not None,
            "bias": bias,
            "bias_strides": (0, 0) if bias is None else (0 if shared else bias.stride(1), bias.stride(2)),
            "BIASED": bias is not None,
        }


def launch_forward(
    q_bhsd: torch.Tensor,
    k_bhsd: torch.Tensor,
    v_bhsd: torch.Tensor,
    out_bhsd: torch.Tensor,
    lse_log2: torch.Tensor,
    scores: Scores,
    *,
    sinks_log2: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    v_scale: float = 1.0,
    config: triton.Config | None = None,
    tma: bool | None = None,
) -> None:
    """Fill `out_bhsd` and `lse_log2` (batch, q_heads, q_len); if `config` is None the autotuner chooses.

    `sinks_log2` (q_heads) in float32 are logits of base 2 that join each row's sum; the backward needs only the sum.
    With `slots` (batch, kv_len) keys and values are pools (1, kv_heads, slots, dim). `v_scale` is a factor of values.
    """
    batch, q_heads, q_len, _ = q_bhsd.shape
    # The copy engine reads rows that lie behind each other.
    tma = False if slots is not None else _tma(tma, q_bhsd, k_bhsd, v_bhsd)
    _run(
        forward_kernel,
        config,
        lambda meta: (triton.cdiv(q_len, meta["BLOCK_M"]) * q_heads * batch,),
        **_operands(tma, q=q_bhsd, k=k_bhsd, v=v_bhsd),
        **_operands(False, out=out_bhsd),
        lse_log2=lse_log2,
        q_heads=q_heads,
        sinks_log2=sinks_log2,
        SINKS=sinks_log2 is not None,
        slots=slots,
        v_scale=v_scale,
        PAGED=slots is not None,
        **_common(q_bhsd, k_bhsd, v_bhsd, scores, tma, kv_len=None if slots is None else slots.shape[1]),
    )


def launch_rows(
    out_bhsd: torch.Tensor, d_out_bhsd: torch.Tensor, lse_log2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (lse_log2, delta), (batch, q_heads, q_len padded): what the backward kernels read of each row."""
    batch, q_heads, q_len, value_dim = out_bhsd.shape
    padded_len = triton.cdiv(q_len, tuning.LARGEST_BACKWARD_BLOCK) * tuning.LARGEST_BACKWARD_BLOCK
    lse, delta = torch.empty(2, batch, q_heads, padded_len, dtype=torch.float32, device=out_bhsd.device)
    rows_kernel[(padded_len // ROWS_BLOCK * q_heads * batch,)](
        out_bhsd,
        d_out_bhsd,
        lse_log2,
        lse,
        delta,
        _strides(out_bhsd),
        _strides(d_out_bhsd),
        q_heads,
        q_len,
        padded_len,
        VALUE_DIM=value_dim,
        BLOCK_DV=padded(value_dim),
        BLOCK_M=ROWS_BLOCK,
    )
    return lse, delta


def launch_dkdv(
    q_bhsd: torch.Tensor,
    k_bhsd: torch.Tensor,
    v_bhsd: torch.Tensor,
    d_out_bhsd: torch.Tensor,
    lse_log2: torch.Tensor,
    delta: torch.Tensor,
    dk_bhsd: torch.Tensor,
    dv_bhsd: torch.Tensor,
    scores: Scores,
    *,
    config: triton.Config | None = None,
    tma: bool | None = None,
    want_dk: bool = True,
    want_dv: bool = True,
) -> None:
    """Fill `dk_bhsd` and `dv_bhsd`, or one of them; one after the other if both exceed the registers."""
    if want_dk and want_dv and padded(q_bhsd.shape[3]) + padded(v_bhsd.shape[3]) > WIDEST_SUMS:
        tensors = (q_bhsd, k_bhsd, v_bhsd, d_out_bhsd, lse_log2, delta, dk_bhsd, dv_bhsd)
        launch_dkdv(*tensors, scores, config=config, tma=tma, want_dv=False)
        launch_dkdv(*tensors, scores, config=config, tma=tma, want_dk=False)
        return
    batch, kv_heads, kv_len, _ = k_bhsd.shape
    tma = _tma(tma, q_bhsd, k_bhsd, v_bhsd, d_out_bhsd)
    _run(
        dkdv_kernel,
        config,
        lambda meta: (triton.cdiv(kv_len, meta["BLOCK_N"]) * kv_heads * batch,),
        **_operands(tma, q=q_bhsd, k=k_bhsd, v=v_bhsd, d_out=d_out_bhsd),
        lse_log2=_flat_source(lse_log2, tma),
        delta=_flat_source(delta, tma),
        padded_len=delta.shape[-1],
        **_operands(False, dk=dk_bhsd, dv=dv_bhsd),
        kv_heads=kv_heads,
        scale=scores.scale,
        query_bounds=None if scores.bounds is None else scores.bounds.queries,
        query_bounds_len=0 if scores.bounds is None else scores.bounds.queries.shape[1],
        WANT_DK=want_dk,
        WANT_DV=want_dv,
        **_common(q_bhsd, k_bhsd, v_bhsd, scores, tma),
    )


def launch_dq(
    q_bhsd: torch.Tensor,
    k_bhsd: torch.Tensor,
    v_bhsd: torch.Tensor,
    d_out_bhsd: torch.Tensor,
    lse_log2: torch.Tensor,
    delta: torch.Tensor,
    dq_bhsd: torch.Tensor,
    scores: Scores,
    *,
    config: triton.Config | None = None,
    tma: bool | None = None,
) -> None:
    """Fill `dq_bhsd`."""
    batch, q_heads, q_len, _ = q_bhsd.shape
    tma = _tma(tma, q_bhsd, k_bhsd, v_bhsd, d_out_bhsd)
    _run(
        dq_kernel,
        config,
        lambda meta: (triton.cdiv(q_len, meta["BLOCK_M"]) * q_heads * batch,),
        **_operands(tma, q=q_bhsd, k=k_bhsd, v=v_bhsd, d_out=d_out_bhsd),
        lse_log2=lse_log2,
        delta=delta,
        padded_len=delta.shape[-1],
        **_operands(False, dq=dq_bhsd),
        q_heads=q_heads,
        scale=scores.scale,
        **_common(q_bhsd, k_bhsd, v_bhsd, scores, tma),
    )


def padded(dim: int) -> int:
    """Return the width of a tile for `dim` columns: Triton's tiles are powers of two, its products at least 16 wide."""
    return max(16, 1 << (dim - 1).bit_length())


def tma_reads(tensor: torch.Tensor) -> bool:
    """Whether Hopper's copy engine can address the tensor, which needs multiples of 16 bytes, and 16-bit products."""
    if not tensor.is_cuda or torch.cuda.get_device_capability(tensor.device) < (9, 0) or tensor.element_size() != 2:
        return False
    aligned = all(stride > 0 and stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:-1])
    return aligned and tensor.data_ptr() % 16 == 0


def _tma(wanted: bool | None, *tensors: torch.Tensor) -> bool:
    return all(map(tma_reads, tensors)) if wanted is None else wanted


def _operands(tma: bool, **tensors_bhsd: torch.Tensor) -> dict[str, Any]:
    """Return tensors, as descriptors for the copy engine if `tma`, and the first three strides of each, by name."""
    operands: dict[str, Any] = {}
    for name, tensor in tensors_bhsd.items():
        operands[name] = tensor
        if tma:
            operands[name] = TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, 1, 16])
        operands[f"{name}_strides"] = _strides(tensor)
    return operands


def _flat_source(rows: torch.Tensor, tma: bool) -> Any:
    return TensorDescriptor(rows, [rows.numel()], [1], [16]) if tma else rows


def _strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    batch, head, row, _ = tensor.stride()
    return batch, head, row


def _common(
    q_bhsd: torch.Tensor,
    k_bhsd: torch.Tensor,
    v_bhsd: torch.Tensor,
    scores: Scores,
    tma: bool,
    kv_len: int | None = None,
) -> dict[str, Any]:
    q_len, dim, value_dim = q_bhsd.shape[2], q_bhsd.shape[3], v_bhsd.shape[3]
    kv_len = k_bhsd.shape[2] if kv_len is None else kv_len
    return {
        "q_len": q_len,
        "kv_len": kv_len,
        # Tuned for each case, whatever ran before. 31 bits, since a wider integer would compile the kernels again.
        "sizes": hash((*q_bhsd.shape, *k_bhsd.shape, kv_len, *scores.mask)) & 0x7FFFFFFF,
        "GROUP": q_bhsd.shape[1] // k_bhsd.shape[1],
        "DIM": dim,
        "VALUE_DIM": value_dim,
        "BLOCK_D": padded(dim),
        "BLOCK_DV": padded(value_dim),
        "TMA": tma,
        **scores.kernel_arguments(),
    }


def _run(
    kernel: Any, config: triton.Config | None, grid: Callable[[dict[str, Any]], tuple[int]], **arguments: Any
) -> None:
    if config is None:
        q = arguments["q"].base if arguments["TMA"] else arguments["q"]
        width = max(arguments["BLOCK_D"], arguments["BLOCK_DV"])
        tuning.autotuned(kernel, q.element_size(), width)[grid](**arguments)
        return
    options = config.all_kwargs()
    tuning.fit_blocks(arguments | options)
    kernel[grid](**arguments, **options)
