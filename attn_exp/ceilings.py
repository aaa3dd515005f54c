"""Ceilings: what this machine's matrix units and memory really reach, measured once a worker and dtype.

On a GPU the matrix products are also the load that brings it into its sustained state: a power cap sets in only
after seconds, and a first job measured cold would be faster than the same job measured later.
"""

import statistics
import time
from collections.abc import Callable

import torch

_MATRIX = {"cuda": 8192, "cpu": 1024}
_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
_LOAD_BATCH = 16


def matmul_ceiling(device: str, dtype: str, load_s: float) -> float:
    """FLOP/s of large square matrix products on normal inputs, the median over the second half of `load_s` seconds."""
    n = _MATRIX[device]
    a, b = (torch.randn(n, n, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    calls = _LOAD_BATCH if device == "cuda" else 1

    def multiply() -> None:
        for _ in range(calls):
            torch.mm(a, b)

    torch.mm(a, b)
    rates: list[float] = []
    started = time.perf_counter()
    while time.perf_counter() - started < load_s or len(rates) < 4:
        rates.append(calls * 2 * n**3 / seconds(device, multiply))
    return statistics.median(rates[len(rates) // 2 :])


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
