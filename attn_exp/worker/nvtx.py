"""NVTX ranges for external profilers: `job:NAME`, inside it `pass:forward`, inside that `phase:timing`.

The host pushes and pops them around whole phases, never around a timed call: nothing is added between the two events of
a sample.
"""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def marked(kind: str, name: str, device: str) -> Iterator[None]:
    """Run what is inside in the NVTX range `kind:name`; do nothing on a CPU."""
    if device != "cuda":
        yield
        return
    torch.cuda.nvtx.range_push(f"{kind}:{name}")
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()
