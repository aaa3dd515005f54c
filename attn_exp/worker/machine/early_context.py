"""Create the CUDA context of the first job's GPU while torch is being imported.

The import runs Python for a second, and the driver does its part without Python's lock. The context is the device's
primary one, which the CUDA runtime, and so PyTorch, uses as well.
"""

import ctypes
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attn_exp.core.request import Request, read_requests

_DRIVER = "libcuda.so.1"
# The driver loads libraries too: not while PyTorch's are, so that neither can wait for a lock that the other holds.
# This module is imported behind them.
_BEHIND_LIBRARIES, _POLL_S = "torch.overrides", 0.005


def lines_of_input() -> Iterator[str]:
    """Return the lines of standard input. A thread reads the first one at once, and prepares its job's GPU."""
    first: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        line = sys.stdin.readline()
        first.put(line)
        if line:
            _prepare(line)

    threading.Thread(target=read, name="early context", daemon=True).start()
    return _lines(first)


def _lines(first: "queue.SimpleQueue[str]") -> Iterator[str]:
    line = first.get()
    if line:
        yield line
        yield from sys.stdin


def _prepare(line: str) -> None:
    while _BEHIND_LIBRARIES not in sys.modules:
        time.sleep(_POLL_S)
    try:
        create_context(read_requests(Path(json.loads(line)))[0][0])
    except Exception:  # whatever is wrong with a job or a driver is said where the job is measured
        return


def create_context(request: Request) -> None:
    """Create the primary context of a request's GPU, if it names one; an error shows when PyTorch asks for it."""
    if request.device != "cuda" or request.gpu_uuid is None:
        return
    # Before the driver is initialised, which reads it then.
    os.environ["CUDA_VISIBLE_DEVICES"] = request.gpu_uuid
    driver: Any = ctypes.CDLL(_DRIVER)
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
