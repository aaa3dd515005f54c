"""Measure the ceilings of this machine's matrix units and memory, once for each worker and dtype.

On a GPU the matrix products are also the load that brings it into its sustained state. A power cap takes effect only
after seconds, so a first job without load would be faster than the same job later.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from attn_exp.attention.inputs import quantised
from attn_exp.core.case.case import E4M3, INT8
from attn_exp.timers.call import seconds

# Sizes of products; most CPUs multiply 16-bit numbers in software, hundreds of times as slowly as float32.
_MATRIX, _MATRIX_16_BITS = {"cuda": 8192, "cpu": 1024}, {"cuda": 8192, "cpu": 256}
_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
# Random bytes that are repeated: a CPU would take longer to draw all of them than to copy them.
_DRAWN_BYTES = {"cuda": _COPY_BYTES["cuda"], "cpu": 1 << 20}
_COPIES = {"cuda": 10, "cpu": 3}
_LOAD_BATCH, _LEAST_RATES = {"cuda": 16, "cpu": 1}, {"cuda": 4, "cpu": 2}
# The longest search for the fastest product; one that takes longer than `_SLOW_S` is no candidate.
_SEARCH_S = 0.5
_SLOW_S = 0.2


def matmul_ceiling(device: str, dtype: str, load_s: float) -> float:
    """Return the FLOP/s of large square matrix products on normal inputs.

    It is the median over the second half of `load_s` seconds.
    """
    n = _size(device, dtype)
    product = _product(device, dtype, n)
    calls = _LOAD_BATCH[device]

    def multiply() -> None:
        for _ in range(calls):
            product()

    product()
    rates: list[float] = []
    started = time.perf_counter()
    while time.perf_counter() - started < load_s or len(rates) < _LEAST_RATES[device]:
        rates.append(calls * 2 * n**3 / seconds(device, multiply))
    return statistics.median(rates[len(rates) // 2 :])


def fastest_product(device: str, dtype: str, enough: float) -> float:
    """Return the highest FLOP/s that this machine is found to reach in products that serve inputs of `dtype`.

    A CPU without units for 16-bit numbers computes with float32, and a GPU may compute float32 in its TF32 units. The
    search ends when a product reaches `enough`, or after half a second.
    """
    dtypes = dict.fromkeys((dtype, "float32")) if device == "cpu" else (dtype,)
    modes = ("highest", "high") if device == "cuda" and dtype == "float32" else (torch.get_float32_matmul_precision(),)
    precision, fastest = torch.get_float32_matmul_precision(), 0.0
    sizes = {of: _size(device, of) for of in dtypes}
    tried = [(n, mode, _product(device, of, n)) for of, n in sizes.items() for mode in modes]
    try:
        started = time.perf_counter()
        while tried and fastest < enough and time.perf_counter() - started < _SEARCH_S:
            for n, mode, product in tuple(tried):
                torch.set_float32_matmul_precision(mode)
                took_s = seconds(device, product)
                fastest = max(fastest, 2 * n**3 / took_s)
                if took_s > _SLOW_S:
                    tried.remove((n, mode, product))
    finally:
        torch.set_float32_matmul_precision(precision)
    return fastest


def _size(device: str, dtype: str) -> int:
    return (_MATRIX if dtype == "float32" else _MATRIX_16_BITS)[device]


def _product(device: str, dtype: str, n: int) -> Callable[[], object]:
    """Return a call that multiplies two square matrices of size n, of normal numbers."""
    if dtype == INT8:
        # The product of scores, which is the faster one of both.
        one, other = (_drawn(n, device, torch.float32).mul_(32).clamp_(-127, 127).to(torch.int8) for _ in range(2))
        return partial(torch._int_mm, one, other.t())
    # Codes are rounded from float32 numbers, as a case's are.
    drawn = torch.float32 if dtype == E4M3 else getattr(torch, dtype)
    a, b = (_drawn(n, device, drawn) for _ in range(2))
    return _code_product(a, b) if dtype == E4M3 else partial(torch.mm, a, b)


def _drawn(n: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    """Return a square matrix of normal numbers, drawn by a generator of its own: a program's stays where it was."""
    return torch.randn(n, n, device=device, dtype=dtype, generator=_generator(device))


def _generator(device: str) -> torch.Generator:
    """Return a generator with a seed that nobody chose."""
    made = torch.Generator(device)
    made.seed()
    return made


def _code_product(a: torch.Tensor, b: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a call that multiplies two matrices as e4m3 codes with one scale for each tensor, into bfloat16.

    `use_fast_accum` keeps the sums in the matrix units. It is the faster way, and a ceiling has to be the fastest.
    """
    one, other = quantised(a), quantised(b)
    scale_a, scale_b = (torch.tensor(factor, device=a.device) for factor in (one.scale, other.scale))
    # The second operand must be column-major.
    columns = other.codes.t().contiguous().t()

    def product() -> torch.Tensor:
        return torch._scaled_mm(one.codes, columns, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True)

    return product


def copy_ceiling(device: str) -> float:
    """Return the bytes/s of a large copy, reads and writes both counted: the median of ten, on a CPU of three."""
    shape, generator = (_DRAWN_BYTES[device],), _generator(device)
    drawn = torch.randint(256, shape, dtype=torch.uint8, device=device, generator=generator)
    source = drawn.repeat(_COPY_BYTES[device] // len(drawn))
    target = torch.empty_like(source)
    target.copy_(source)
    copies = [seconds(device, lambda: target.copy_(source)) for _ in range(_COPIES[device])]
    return 2 * _COPY_BYTES[device] / statistics.median(copies)
