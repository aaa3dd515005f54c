"""Whether two results ran one and the same kernel: a difference between their times is then noise."""

import re
from functools import lru_cache

from attn_exp.results.result import Result

# Names of C++ carry their template arguments, and those of libraries shape and architecture. A plain name, as Triton
# gives to kernels, is also that of the same function with other tiles.
_TELLING = re.compile(r"\W|cudnn|cutlass|nvjet|sm\d+_|_sm\d+")
# The operators of PyTorch's CPU backends that compute attention as a whole; their wrapper has none of these names.
_ATTENTION = re.compile(r"aten::_\w*attention\w*")


def attends(name: str) -> bool:
    """Return whether an operator of a CPU computes attention as a whole."""
    return _ATTENTION.fullmatch(name) is not None


def kernel_identity(result: Result, direction: str) -> frozenset[str] | None:
    """Return what identifies the kernels of a pass; None if their names do not, or if they are unknown.

    On a CPU it is the names of all operators, if one of them computes attention as a whole.
    """
    return _identity(result.kernels.get(direction, ()), result.device) if result.status == "ok" else None


# Each result of a case is compared with each other one, and thousands have the same kernels.
@lru_cache(1 << 12)
def _identity(kernels: tuple[str, ...], device: str) -> frozenset[str] | None:
    names = frozenset(kernels)
    if device == "cpu":
        return names if any(map(attends, names)) else None
    return names if names and all(_TELLING.search(name) for name in names) else None


def same_kernel(one: Result, other: Result, direction: str) -> bool:
    """Return whether two results of one case ran the same kernels in a pass, as far as their names tell."""
    own = kernel_identity(one, direction)
    return own is not None and own == kernel_identity(other, direction)
