"""PyTorch's profiler without the lines that Kineto, its tracer, writes to standard error."""

import os
from typing import Any

from torch.autograd.profiler import profile

# Kineto reads it when a process traces for the first time. At 5 torch 2.13 still writes two lines a trace (USDT).
_LEVEL, _SILENT = "KINETO_LOG_LEVEL", "6"


def silent_profile(**options: Any) -> profile:
    """Return `torch.autograd.profiler.profile(**options)`, which writes nothing unless KINETO_LOG_LEVEL says so."""
    os.environ.setdefault(_LEVEL, _SILENT)
    return profile(**options)
