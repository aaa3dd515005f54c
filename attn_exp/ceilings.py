"""Ceilings: what this machine's matrix units and memory really reach, measured once a worker and dtype.

On a GPU the matrix products are also the load that brings it into its sustained state: a power cap sets in only
after seconds, and a first job measured cold would be faster than the same job measured later.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from attn_exp.case import E4M3
from attn_exp.quantise import quantised

_MATRIX = {"cuda": 8192, "cpu": 1024}
_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
_LOAD_BATCH = 16


def matmul_ceiling(device: str, dtype: str, load_s: float) -> float:
    """FLOP/s of large square matrix products on normal inputs, the median over the second half of `load_s` seconds."""
    n = _MATRIX[device]
    # Codes are rounded from numbers that are drawn in float32, as a case's are.
    drawn = torch.float32 if dtype == E4M3 else getattr(torch, dtype)
    a, b = (torch.randn(n, n, device=device, dtype=drawn) for _ in range(2))
    product = _code_product(a, b) if dtype == E4M3 else partial(torch.mm, a, b)
    calls = _LOAD_BATCH if device == "cuda" else 1

    def multiply() -> None:
        for _ in range(calls):
            product()

    product()
    rates: list[float] = []
    started = time.perf_counter()
    while time.perf_counter() - started < load_s or len(rates) < 4:
        rates.append(calls * 2 * n**3 / seconds(device, multiply))
    return statistics.median(rates[len(rates) // 2 :])


def _code_product(a: torch.Tensor, b: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A call that multiplies the two as e4m3 codes with a scale a tensor, into bfloat16.

    Sums stay in the matrix units (`use_fast_accum`): the faster way, and a ceiling has to be the fastest.
    """
    one, other = quantised(a), quantised(b)
    scale_a, scale_b = (torch.tensor(factor, device=a.device) for factor in (one.scale, other.scale))
    # The second one lies by columns: nothing else is taken.
    columns = other.codes.t().contiguous().t()

    def product() -> torch.Tensor:
        return torch._scaled_mm(one.codes, columns, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True)

    return product


def copy_ceiling(device: str) -> float:
    """Bytes/s of a large copy, read and written bytes counted, the median of ten."""
    source = torch.randint(256, (_COPY_BYTES[device],), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * _COPY_BYTES[device] / statistics.median(seconds(device, lambda: target.copy_(source)) for _ in range(10))


def seconds(device: str, run: Callable[[], object]) -> float:
    """How long the device takes for `run`, in seconds; by events on a GPU, since other threads may hold up this one."""
    if device == "cpu":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    run()
    second.record()
    second.synchronize()
    return float(first.elapsed_time(second)) / 1e3


def synchronize(device: str) -> None:
    """Wait for the device's work; errors of earlier calls surface here."""
    if device == "cuda":
        torch.cuda.synchronize()
