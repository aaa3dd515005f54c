"""NVTX ranges: `job:NAME`, inside of it `pass:forward`, inside of that `phase:timing`, for any outside profiler.

They are pushed and popped by the host around whole phases, never around a call that is being timed: between the two
events of a sample nothing is added.
"""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def marked(kind: str, name: str, device: str) -> Iterator[None]:
    """Everything inside under the NVTX range `kind:name`; nothing on a CPU, where there is nobody to see it."""
    if device != "cuda":
        yield
        return
    torch.cuda.nvtx.range_push(f"{kind}:{name}")
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()
