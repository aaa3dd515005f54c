"""The call that a timer times, and waiting for its device."""

import time
from collections.abc import Callable
from typing import Any

import torch

# A call without arguments, ready to be timed: inputs are built, layouts converted, graphs compiled.
Call = Callable[[], Any]


def seconds(device: str, run: Callable[[], object]) -> float:
    """Call `run` and return how many seconds it takes on the device.

    On a GPU events measure them, since other threads may delay this one.
    """
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
    """Wait for the device's work; errors of earlier calls are raised here."""
    if device == "cuda":
        torch.cuda.synchronize()
