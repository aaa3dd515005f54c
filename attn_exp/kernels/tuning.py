"""Configurations of the kernels: which exist, which fit, and the autotuner that selects one."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from attn_exp.kernels.backward_kernels import dkdv_kernel, dq_kernel
from attn_exp.kernels.forward_kernel import forward_kernel

# Shared memory of one block on an H100 or H200, less what Triton reserves.
SHARED_BYTES = 224 * 1024
# The backward pass pads its rows to this; none of its blocks is larger.
LARGEST_BACKWARD_BLOCK = 128


def fit_blocks(arguments: dict[str, Any]) -> None:
    """Set the descriptors' block shape to that of the configuration about to run (a hook of `triton.Config`)."""
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
    kernel: Any, block_m: int, block_n: int, warps: int, stages: int, overlap: bool = False
) -> triton.Config:
    """Return one configuration: queries and keys of a block, warps, and stages of the load pipeline.

    `overlap` only affects the forward kernel.
    """
    meta: dict[str, Any] = {"BLOCK_M": block_m, "BLOCK_N": block_n}
    if kernel is forward_kernel:
        meta["OVERLAP"] = overlap
    return triton.Config(meta, num_warps=warps, num_stages=stages, pre_hook=fit_blocks)


@cache
def autotuned(kernel: Any, item_bytes: int, width: int) -> Any:
    """Wrap the kernel in `triton.autotune` for one element size and one tile width."""
    return triton.autotune(
        configs_of(kernel, item_bytes, width),
        key=[
            *("sizes", "GROUP", "DIM", "VALUE_DIM", "CAUSAL", "WINDOWED", "BOUNDED", "SOFTCAPPED"),
            *("SINKS", "ALIBI", "BIASED", "PAGED", "TMA", "WANT_DK", "WANT_DV"),
        ],
        prune_configs_by={"early_config_prune": partial(_prune, kernel, item_bytes)},
        do_bench=bench,
    )(kernel)


# Of each configuration at least and at most so many calls are timed, and about so many milliseconds between these.
_LEAST_CALLS, _MOST_CALLS, _ABOUT_MS = 3, 20, 100.0
# The GPU sleeps for 5 ms while the host enqueues them, which takes some 50 us a call.
_AHEAD_CYCLES = 10_000_000


def bench(call: Callable[[], object], quantiles: Sequence[float]) -> list[float]:
    """Return quantiles of a call's time on the GPU in milliseconds, with a cold L2 cache.

    The autotuner's default, `triton.testing.do_bench`, measures the launch where a call is shorter than that. All
    configurations then seem to take the same time, and chance selects one.
    """
    call()  # compiles
    (about_ms,) = _times_ms(call, 1)
    times_ms = sorted(_times_ms(call, max(_LEAST_CALLS, min(_MOST_CALLS, round(_ABOUT_MS / about_ms)))))
    return [times_ms[int(share * len(times_ms))] for share in quantiles]


def _times_ms(call: Callable[[], object], count: int) -> list[float]:
    driver = triton.runtime.driver.active
    cold = driver.get_empty_cache_for_benchmark()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    torch.cuda._sleep(_AHEAD_CYCLES)
    for first, second in events:
        driver.clear_cache(cold)
        first.record()
        call()
        second.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(second) for first, second in events]


def configs_of(kernel: Any, item_bytes: int, width: int) -> list[triton.Config]:
    """Return the configurations to try for tiles of `width` columns, measured on an H200. The last one always fits."""
    if triton.knobs.runtime.interpret:
        # Unequal blocks, so that tests with short lengths cover every kind of block.
        return [make_config(kernel, 32, 16, 4, 1)]
    table = _FLOAT32 if item_bytes == 4 else _SIXTEEN_BITS
    nearest = min(known for known in table[kernel] if known >= min(width, 256))
    return [make_config(kernel, *numbers) for numbers in table[kernel][nearest]]


def _prune(
    kernel: Any, item_bytes: int, configs: list[triton.Config], named: dict[str, Any], **kwargs: Any
) -> list[triton.Config]:
    """Keep what fits into shared memory, with blocks neither much larger nor much smaller than the lengths."""
    arguments = named | kwargs
    held, streamed = ("BLOCK_N", "BLOCK_M") if kernel is dkdv_kernel else ("BLOCK_M", "BLOCK_N")
    length = arguments["kv_len"] if kernel is dkdv_kernel else arguments["q_len"]
    both = arguments["BLOCK_D"] + arguments["BLOCK_DV"]
    held_width = arguments["BLOCK_D"] if kernel is forward_kernel else both

    def fits(config: triton.Config) -> bool:
        tiles = config.kwargs[held] * held_width + config.num_stages * config.kwargs[streamed] * both
        return bool(tiles * item_bytes <= SHARED_BYTES)

    fitting = [config for config in configs if fits(config)] or configs[-1:]
    # A tile of fewer than 64 queries leaves Hopper's matrix instructions unused: only for few rows.
    most = 2 * max(16, length)
    least = 64 if length > 64 and item_bytes == 2 and kernel is not dkdv_kernel else 0
    right = [config for config in fitting if least <= config.kwargs[held] < most]
    return right or [min(fitting, key=lambda config: int(config.kwargs[held]))]


# Queries of a block, keys of a block, warps, pipeline stages, overlap; by the width of the tiles.
_Table = dict[Any, dict[int, list[tuple[Any, ...]]]]
# Most of the fastest leave room for a second block on a multiprocessor, whose products run during the exponentials of
# the first. In dkdv_kernel at 128, 4 warps and 2 stages are faster than 3 stages by a fifth.
_SIXTEEN_BITS: _Table = {
    forward_kernel: {
        64: [(64, 128, 4, 2), (64, 64, 4, 3), (16, 64, 4, 3)],
        128: [(128, 64, 4, 2), (64, 64, 4, 3), (128, 128, 8, 3), (16, 64, 4, 3)],
        256: [(64, 64, 4, 3, True), (128, 64, 8, 2), (16, 32, 4, 2)],
    },
    dkdv_kernel: {
        64: [(128, 64, 4, 2), (32, 64, 4, 3)],
        128: [(64, 64, 4, 2), (64, 128, 8, 3)],
        256: [(32, 128, 8, 3), (32, 64, 4, 2)],
    },
    dq_kernel: {
        64: [(128, 64, 8, 3), (64, 64, 4, 2), (16, 64, 4, 2)],
        128: [(128, 32, 8, 3), (64, 64, 4, 2), (16, 64, 4, 2)],
        256: [(128, 32, 8, 3), (64, 64, 4, 2), (16, 32, 4, 1)],
    },
}
# Products of float32 run on the CUDA cores: small blocks, whose operands fit into registers.
_FLOAT32: _Table = {
    forward_kernel: {
        64: [(64, 64, 8, 2), (16, 32, 4, 2)],
        128: [(64, 32, 8, 2), (16, 32, 4, 1)],
        256: [(32, 32, 8, 1), (16, 16, 4, 1)],
    },
    dkdv_kernel: {64: [(32, 32, 4, 1)], 128: [(32, 32, 8, 1)], 256: [(16, 32, 8, 1)]},
    dq_kernel: {64: [(32, 32, 4, 1)], 128: [(32, 32, 8, 1)], 256: [(16, 16, 8, 1)]},
}
