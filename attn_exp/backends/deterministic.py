"""PyTorch's switch for deterministic algorithms, around the calls of a backend that has no option of its own."""

import contextlib
from collections.abc import Iterator

import torch
from torch.utils import deterministic as switches


@contextlib.contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Let operators take deterministic algorithms inside, or raise if they have none.

    Uninitialised memory is not filled, which PyTorch does then by default: its kernels would be in the time.

    Args:
        wanted: whether to change anything.
    """
    if not wanted:
        yield
        return
    before = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    fills = switches.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    switches.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        switches.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
