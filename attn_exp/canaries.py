"""Canaries: the same small work in every worker, to divide two sessions' figures by how the machine was."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_exp.ceilings import seconds

_CALLS = 7
_SLEEP_CYCLES = 2_000_000


@dataclass(frozen=True)
class _Sizes:
    """So that each takes about a millisecond; attention is (batch, heads, length, head_dim)."""

    copy_bytes: int
    matrix: int
    attention: tuple[int, int, int, int]
    dtype: torch.dtype


_SIZES = {
    "cuda": _Sizes(1 << 30, 8192, (4, 16, 2048, 128), torch.bfloat16),
    "cpu": _Sizes(1 << 23, 384, (1, 4, 256, 64), torch.float32),
}


def canaries(device: str) -> dict[str, float]:
    """Microseconds of a sleep (on a GPU), a copy, a matrix product and a fixed attention: medians of seven."""
    sizes = _SIZES[device]
    source = torch.randint(256, (sizes.copy_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    matrix = torch.randn(sizes.matrix, sizes.matrix, device=device, dtype=sizes.dtype)
    q, k, v = (torch.randn(sizes.attention, device=device, dtype=sizes.dtype) for _ in range(3))
    work: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "matmul": lambda: torch.mm(matrix, matrix),
        "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),
    }
    if device == "cuda":
        work["sleep"] = lambda: torch.cuda._sleep(_SLEEP_CYCLES)
    # FlashAttention where there is one, which before Ampere there is not.
    usable = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(usable, set_priority=True), torch.no_grad():
        return {name: _median_us(device, run) for name, run in work.items()}


def _median_us(device: str, run: Callable[[], object]) -> float:
    run()
    return 1e6 * statistics.median(seconds(device, run) for _ in range(_CALLS))
