"""Launches of the kernels: which configurations there are, which of them fit, and what each kernel is given."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from attn_exp.kernels.backward_kernels import dkdv_kernel, dq_kernel, rows_kernel
from attn_exp.kernels.forward_kernel import forward_kernel

LOG2_E = math.log2(math.e)
# Shared memory of one block on an H100 or H200, less what Triton keeps for itself.
SHARED_BYTES = 224 * 1024
# Rows of the backward pass are padded to this: no block has more.
LARGEST_BLOCK = 128
ROWS_BLOCK = 64


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How scores come from q kT: scale, softcap and mask. Query i sees keys i + offset - window < j <= i + offset.

    `window` and `softcap` are None for none; without `causal` neither offset nor window counts.
    """

    scale: float
    causal: bool
    offset: int
    window: int | None
    softcap: float | None

    def kernel_arguments(self) -> dict[str, Any]:
        """`inner` and `outer` fold scale and softcap into the factors that the kernels multiply by anyway."""
        capped = self.softcap is not None
        return {
            "inner": self.scale / self.softcap if self.softcap is not None else 1.0,
            "outer": (self.softcap if self.softcap is not None else self.scale) * LOG2_E,
            "offset": self.offset if self.causal else 0,
            "window": self.window or 0,
            "CAUSAL": self.causal,
            "WINDOWED": self.window is not None,
            "SOFTCAPPED": capped,
        }


def launch_forward(
    q_bhsd: torch.Tensor,
    k_bhsd: torch.Tensor,
    v_bhsd: torch.Tensor,
    out_bhsd: torch.Tensor,
    lse_log2: torch.Tensor,
    scores: Scores,
    *,
    config: triton.Config | None = None,
    tma: bool | None = None,
) -> None:
    """Fill `out_bhsd` and `lse_log2` (batch, q_heads, q_len); `config` None lets the autotuner choose."""
    batch, q_heads, q_len, _ = q_bhsd.shape
    tma = _tma(tma, q_bhsd, k_bhsd, v_bhsd)
    q, k, v = (_source(tensor, tma) for tensor in (q_bhsd, k_bhsd, v_bhsd))
    _run(
        forward_kernel,
        config,
        lambda meta: (triton.cdiv(q_len, meta["BLOCK_M"]) * q_heads * batch,),
        q=q,
        k=k,
        v=v,
        out=out_bhsd,
        lse_log2=lse_log2,
        q_strides=_strides(q_bhsd),
        k_strides=_strides(k_bhsd),
        v_strides=_strides(v_bhsd),
        out_strides=_strides(out_bhsd),
        q_heads=q_heads,
        **_common(q_bhsd, k_bhsd, v_bhsd, scores, tma),
    )


def launch_rows(
    out_bhsd: torch.Tensor, d_out_bhsd: torch.Tensor, lse_log2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(lse_log2, delta), (batch, q_heads, q_len padded): what the backward kernels read of each row."""
    batch, q_heads, q_len, value_dim = out_bhsd.shape
    padded_len = triton.cdiv(q_len, LARGEST_BLOCK) * LARGEST_BLOCK
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
    """Fill `dk_bhsd` and `dv_bhsd`, or one of them."""
    batch, kv_heads, kv_len, _ = k_bhsd.shape
    tma = _tma(tma, q_bhsd, k_bhsd, v_bhsd, d_out_bhsd)
    q, k, v, d_out = (_source(tensor, tma) for tensor in (q_bhsd, k_bhsd, v_bhsd, d_out_bhsd))
    _run(
        dkdv_kernel,
        config,
        lambda meta: (triton.cdiv(kv_len, meta["BLOCK_N"]) * kv_heads * batch,),
        q=q,
        k=k,
        v=v,
        d_out=d_out,
        lse_log2=_flat_source(lse_log2, tma),
        delta=_flat_source(delta, tma),
        padded_len=delta.shape[-1],
        dk=dk_bhsd,
        dv=dv_bhsd,
        q_strides=_strides(q_bhsd),
        k_strides=_strides(k_bhsd),
        v_strides=_strides(v_bhsd),
        d_out_strides=_strides(d_out_bhsd),
        dk_strides=_strides(dk_bhsd),
        dv_strides=_strides(dv_bhsd),
        kv_heads=kv_heads,
        scale=scores.scale,
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
    q, k, v, d_out = (_source(tensor, tma) for tensor in (q_bhsd, k_bhsd, v_bhsd, d_out_bhsd))
    _run(
        dq_kernel,
        config,
        lambda meta: (triton.cdiv(q_len, meta["BLOCK_M"]) * q_heads * batch,),
        q=q,
        k=k,
        v=v,
        d_out=d_out,
        lse_log2=lse_log2,
        delta=delta,
        padded_len=delta.shape[-1],
        dq=dq_bhsd,
        q_strides=_strides(q_bhsd),
        k_strides=_strides(k_bhsd),
        v_strides=_strides(v_bhsd),
        d_out_strides=_strides(d_out_bhsd),
        dq_strides=_strides(dq_bhsd),
        q_heads=q_heads,
        scale=scores.scale,
        **_common(q_bhsd, k_bhsd, v_bhsd, scores, tma),
    )


def padded(dim: int) -> int:
    """The width of a tile that holds `dim` columns: Triton's tiles are powers of two, its products at least 16 wide."""
    return max(16, triton.next_power_of_2(dim))


def tma_reads(tensor: torch.Tensor) -> bool:
    """Whether Hopper's copy engine can address the tensor: it wants multiples of 16 bytes, and 16-bit products."""
    if not tensor.is_cuda or torch.cuda.get_device_capability(tensor.device) < (9, 0) or tensor.element_size() != 2:
        return False
    aligned = all(stride > 0 and stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:-1])
    return aligned and tensor.data_ptr() % 16 == 0


def fit_blocks(arguments: dict[str, Any]) -> None:
    """Give descriptors the block shape of the configuration about to run (a hook of `triton.Config`)."""
    for name, rows, columns in (
        ("q", "BLOCK_M", "BLOCK_D"),
        ("k", "BLOCK_N", "BLOCK_D"),
        ("v", "BLOCK_N", "BLOCK_DV"),
        ("d_out", "BLOCK_M", "BLOCK_DV"),
    ):
        if isinstance(arguments.get(name), TensorDescriptor):
            arguments[name].block_shape = [1, 1, arguments[rows], arguments[columns]]
    for name in ("lse_log2", "delta"):
        if isinstance(arguments.get(name), TensorDescriptor):
            arguments[name].block_shape = [arguments["BLOCK_M"]]


def make_config(
    kernel: Any,
    block_m: int,
    block_n: int,
    warps: int,
    stages: int,
    *,
    overlap: bool = False,
    maxnreg: int | None = None,
) -> triton.Config:
    """One point of the autotuner's space: queries and keys of a block, warps, stages of the loads' pipeline."""
    meta: dict[str, Any] = {"BLOCK_M": block_m, "BLOCK_N": block_n}
    if kernel is forward_kernel:
        meta["OVERLAP"] = overlap
    return triton.Config(meta, num_warps=warps, num_stages=stages, maxnreg=maxnreg, pre_hook=fit_blocks)


def _tma(wanted: bool | None, *tensors: torch.Tensor) -> bool:
    return all(map(tma_reads, tensors)) if wanted is None else wanted


def _source(tensor: torch.Tensor, tma: bool) -> Any:
    if not tma:
        return tensor
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, 1, 16])


def _flat_source(rows: torch.Tensor, tma: bool) -> Any:
    return TensorDescriptor(rows, [rows.numel()], [1], [16]) if tma else rows


def _strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    batch, head, row, _ = tensor.stride()
    return batch, head, row


def _common(
    q_bhsd: torch.Tensor, k_bhsd: torch.Tensor, v_bhsd: torch.Tensor, scores: Scores, tma: bool
) -> dict[str, Any]:
    q_len, kv_len, dim, value_dim = q_bhsd.shape[2], k_bhsd.shape[2], q_bhsd.shape[3], v_bhsd.shape[3]
    return {
        "q_len": q_len,
        "kv_len": kv_len,
        # Up to 8, 128, 2048, 32768: lengths of one bucket share a configuration.
        "bucket": (max(q_len, 2) - 1).bit_length() // 4 * 16 + (max(kv_len, 2) - 1).bit_length() // 4,
        "GROUP": q_bhsd.shape[1] // k_bhsd.shape[1],
        "DIM": dim,
        "VALUE_DIM": value_dim,
        "BLOCK_D": padded(dim),
        "BLOCK_DV": padded(value_dim),
        "TMA": tma,
        **scores.kernel_arguments(),
    }


def _run(
    kernel: Any,
    config: triton.Config | None,
    grid: Callable[[dict[str, Any]], tuple[int]],
    **arguments: Any,
) -> None:
    if config is None:
        q = arguments["q"].base if arguments["TMA"] else arguments["q"]
        width = max(arguments["BLOCK_D"], arguments["BLOCK_DV"])
        _autotuned(kernel, q.element_size(), width)[grid](**arguments)
        return
    options = config.all_kwargs()
    fit_blocks(arguments | options)
    kernel[grid](**arguments, **options)


@cache
def _autotuned(kernel: Any, item_bytes: int, width: int) -> Any:
    return triton.autotune(
        configs_of(kernel, item_bytes, width),
        key=["bucket", "GROUP", "DIM", "VALUE_DIM", "CAUSAL", "WINDOWED", "SOFTCAPPED", "TMA"],
        prune_configs_by={"early_config_prune": partial(_prune, kernel, item_bytes)},
    )(kernel)


def configs_of(kernel: Any, item_bytes: int, width: int) -> list[triton.Config]:
    """The configurations worth trying for tiles of `width` columns, measured on an H200; the last one always fits."""
    if triton.knobs.runtime.interpret:
        # Unequal blocks, so that tests with short lengths meet every kind of block.
        return [make_config(kernel, 32, 16, 4, 1)]
    table = _FLOAT32 if item_bytes == 4 else _SIXTEEN_BITS
    nearest = min(known for known in table[kernel] if known >= min(width, 256))
    return [make_config(kernel, *numbers) for numbers in table[kernel][nearest]]


def _prune(
    kernel: Any, item_bytes: int, configs: list[triton.Config], named: dict[str, Any], **kwargs: Any
) -> list[triton.Config]:
    """Keep what fits into shared memory, and no block of more than twice the queries (or keys) that there are."""
    arguments = named | kwargs
    held, streamed = ("BLOCK_N", "BLOCK_M") if kernel is dkdv_kernel else ("BLOCK_M", "BLOCK_N")
    length = arguments["kv_len"] if kernel is dkdv_kernel else arguments["q_len"]
    both = arguments["BLOCK_D"] + arguments["BLOCK_DV"]
    held_width = arguments["BLOCK_D"] if kernel is forward_kernel else both

    def fits(config: triton.Config) -> bool:
        tiles = config.kwargs[held] * held_width + config.num_stages * config.kwargs[streamed] * both
        return tiles * item_bytes <= SHARED_BYTES

    fitting = [config for config in configs if fits(config)] or configs[-1:]
    short = [config for config in fitting if config.kwargs[held] < 2 * max(16, length)]
    return short or [min(fitting, key=lambda config: int(config.kwargs[held]))]


# Queries of a block, keys of a block, warps, pipeline stages; by the width of the tiles.
_Table = dict[Any, dict[int, list[tuple[Any, ...]]]]
_SIXTEEN_BITS: _Table = {
    forward_kernel: {
        64: [(128, 128, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3), (16, 64, 4, 3)],
        128: [(128, 128, 8, 2), (128, 64, 8, 3), (64, 64, 4, 3), (16, 64, 4, 3)],
        256: [(128, 64, 8, 2), (64, 64, 4, 2), (16, 32, 4, 2)],
    },
    dkdv_kernel: {
        64: [(64, 128, 8, 3), (64, 128, 4, 2), (64, 64, 4, 2)],
        128: [(64, 128, 8, 3), (64, 128, 8, 2), (64, 64, 4, 2)],
        256: [(64, 64, 8, 2), (32, 64, 8, 2), (32, 64, 4, 1)],
    },
    dq_kernel: {
        64: [(128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 2), (16, 64, 4, 2)],
        128: [(128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 2), (16, 64, 4, 2)],
        256: [(128, 64, 8, 1), (64, 64, 8, 2), (16, 32, 4, 1)],
    },
}
# Products of float32 run on the ordinary cores: small blocks, whose operands fit into registers.
_FLOAT32: _Table = {
    forward_kernel: {
        64: [(64, 64, 8, 2), (64, 32, 4, 2), (16, 32, 4, 2)],
        128: [(64, 32, 8, 2), (32, 32, 4, 2), (16, 32, 4, 1)],
        256: [(32, 32, 8, 1), (16, 16, 4, 1)],
    },
    dkdv_kernel: {
        64: [(32, 64, 8, 1), (32, 32, 4, 1)],
        128: [(32, 32, 8, 1), (16, 32, 8, 1)],
        256: [(16, 32, 8, 1), (16, 16, 8, 1)],
    },
    dq_kernel: {
        64: [(64, 32, 8, 1), (32, 32, 4, 1)],
        128: [(32, 32, 8, 1), (32, 16, 8, 1)],
        256: [(32, 16, 8, 1), (16, 16, 8, 1)],
    },
}
