"""Inputs that are not what was asked, other results later, and memory outside of PyTorch's allocator."""

import ctypes
import itertools
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attn_exp.attention.inputs import Inputs
from attn_exp.backends.base import Calls
from attn_exp.core.case import Case
from cheats.gpu.base import WRONG, Forward, OnGpu, any_of, attend, gpu_cheat

_HONEST_CALLS = 4
OUTSIDE_BYTES = 1 << 29


def runtime() -> Any:
    """Return the CUDA runtime library that this process has loaded, whatever its version.

    Raises:
        OSError: none is loaded.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if re.search(r"/libcudart[.-][^/]*so", path):
            return ctypes.CDLL(path)
    raise OSError("this process has loaded no libcudart")


def outside(library: Any, count: int) -> int:
    """Return the address of `count` bytes by cudaMalloc."""
    address = ctypes.c_void_p()
    failed = library.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(count))
    if failed or address.value is None:
        raise MemoryError(f"cudaMalloc returned {failed}")
    return address.value


def free(library: Any, address: int) -> None:
    """Give memory of `outside` back."""
    library.cudaFree(ctypes.c_void_p(address))


class MemoryOutside(OnGpu):
    """Right, with a workspace of half a GiB that PyTorch's allocator does not know; run by a test of its own."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        library = runtime()
        weakref.finalize(self, free, library, outside(library, OUTSIDE_BYTES))
        return lambda: self.attention(case, *inputs.qkv)


@gpu_cheat("inputs", ("inaccurate", "error"), any_of(WRONG, "input"))
class NamesUnreadCopies(OnGpu):
    """Names copies of the inputs that no call reads."""

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        copies = Inputs(*(tensor.detach().clone() for tensor in (*inputs.qkv, inputs.d_out)), inputs.scales)
        return replace(super().prepare(case, inputs), inputs=copies)


@gpu_cheat("inputs", ("inaccurate", "error"), any_of(WRONG, "input"))
class NamesEasyInputs(OnGpu):
    """Names tensors of zeros as its inputs, for which the output is zero, and computes it from the second call on."""

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        zeros = Inputs(*(torch.zeros_like(tensor) for tensor in (*inputs.qkv, inputs.d_out)), inputs.scales)
        calls, first, rest = itertools.count(), super().prepare(case, inputs), super().prepare(case, zeros)
        forward = lambda: (rest if next(calls) else first).forward()  # noqa: E731
        return replace(first, forward=forward, inputs=zeros)


@gpu_cheat("inputs", ("inaccurate", "error"), any_of(WRONG, "input"))
class OverwritesItsInputs(OnGpu):
    """Clears v in place after the first call: zeros take less power, and every later output is zero."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        calls = itertools.count()

        def forward() -> torch.Tensor:
            if next(calls) == 1:
                inputs.v_bhsd.zero_()
            return attend(case, *inputs.qkv)

        return forward


@gpu_cheat("inputs", ("inaccurate", "error"), any_of(WRONG, "input"))
class ConvertsOnlyOnce(OnGpu):
    """Converts the inputs to another layout in the preparation, and does not say so."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        q, k, v = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in inputs.qkv)
        return lambda: attend(case, q, k, v)


class _Later(OnGpu):
    """Right in the first calls; then `later`."""

    def later(self, case: Case, inputs: Inputs) -> torch.Tensor:
        """Do something else."""
        raise NotImplementedError

    def make(self, case: Case, inputs: Inputs) -> Forward:
        calls, right = itertools.count(), super().make(case, inputs)
        return lambda: right() if next(calls) < _HONEST_CALLS else self.later(case, inputs)


@gpu_cheat("bad input", ("inaccurate", "error"), r"shape|size|\bout\b")
class AnotherShapeLaterOnGpu(_Later):
    """Returns half of the queries after the first calls."""

    def later(self, case: Case, inputs: Inputs) -> torch.Tensor:
        q, k, v = inputs.qkv
        return attend(case, q[:, :, : case.q_len // 2], k, v)


@gpu_cheat("bad input", ("inaccurate", "error"), r"dtype|float16|bfloat16")
class AnotherDtypeLaterOnGpu(_Later):
    """Returns float16 after the first calls."""

    def later(self, case: Case, inputs: Inputs) -> torch.Tensor:
        return attend(case, *(tensor.half() for tensor in inputs.qkv))


@gpu_cheat("bad input", ("inaccurate", "error"), r"device|cpu")
class OnTheCpuLater(_Later):
    """Returns a tensor of the CPU after the first calls."""

    def later(self, case: Case, inputs: Inputs) -> torch.Tensor:
        return torch.zeros(inputs.d_out.shape, dtype=inputs.d_out.dtype)


@gpu_cheat("bad input", "error", "out of registers")
class RaisesLaterOnGpu(_Later):
    """Raises after the first calls."""

    def later(self, case: Case, inputs: Inputs) -> torch.Tensor:
        raise RuntimeError("out of registers")
