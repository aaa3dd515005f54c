"""Ceilings: what this machine's matrix units and memory really reach, measured once a worker and dtype.

On a GPU the matrix products are also the load that brings it into its sustained state: a power cap sets in only
after seconds, and a first job measured cold would be faster than the same job measured later.
"""

import statistics
import time
from typing import Any

import torch

_MATRIX = {"cuda": 8192, "cpu": 1024}
_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
_LOAD_BATCH = 16


def matmul_ceiling(device: str, dtype: str, load_s: float) -> float:
    """FLOP/s of large square matrix products on normal inputs, the median over the second half of `load_s` seconds."""
    n = _MATRIX[device]
    a, b = (torch.randn(n, n, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    torch.mm(a, b)
    rates: list[float] = []
    synchronize(device)
    started = now = time.perf_counter()
    while now - started < load_s or len(rates) < 4:
        calls = _LOAD_BATCH if device == "cuda" else 1
        for _ in range(calls):
            torch.mm(a, b)
        synchronize(device)
        before, now = now, time.perf_counter()
        rates.append(calls * 2 * n**3 / (now - before))
    return statistics.median(rates[len(rates) // 2 :])


def copy_ceiling(device: str) -> float:
    """Bytes/s of a large copy, read and written bytes counted, the median of ten."""
    source = torch.randint(256, (_COPY_BYTES[device],), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    times = []
    for _ in range(10):
        synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        times.append(time.perf_counter() - began)
    return 2 * _COPY_BYTES[device] / statistics.median(times)


def synchronize(device: str) -> Any:
    """Wait for the device's work; errors of earlier calls surface here."""
    if device == "cuda":
        torch.cuda.synchronize()
