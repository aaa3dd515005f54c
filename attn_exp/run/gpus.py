"""The GPUs of this host that may be used, and a lease so that two processes never time on the same one."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from attn_exp.core.nvml import GpuInfo, list_gpus


def visible_gpus() -> list[GpuInfo]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, in its order; all of them if it is not set."""
    gpus, visible = list_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    chosen = []
    for entry in filter(None, (part.strip() for part in visible.split(","))):
        match = [gpu for gpu in gpus if str(gpu.index) == entry or gpu.uuid.startswith(entry)]
        if not match:
            break  # as CUDA does: it ignores everything after an entry that does not exist
        chosen.append(match[0])
    return chosen


class Lease:
    """The right to time on one GPU. It is a file lock, so it ends with the process in any case."""

    def __init__(self, gpu: GpuInfo, lock: FileLock) -> None:
        self.gpu = gpu
        self._lock = lock

    def release(self) -> None:
        """Release the GPU."""
        self._lock.release()


def lease(gpus: list[GpuInfo], waiting: Callable[[str], None]) -> Lease:
    """Lease the first free GPU; if all are taken, say so through `waiting` and wait for the first one."""
    free = try_lease(gpus)
    if free is not None:
        return free
    gpu = gpus[0]
    waiting(f"waiting for GPU {gpu.index} ({gpu.name}), on which another attn_exp is measuring")
    lock = FileLock(_lock_path(gpu))
    lock.acquire()
    return Lease(gpu, lock)


def try_lease(gpus: list[GpuInfo]) -> Lease | None:
    """Lease the first free GPU; return None if all are taken."""
    for gpu in gpus:
        lock = FileLock(_lock_path(gpu))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            continue
        return Lease(gpu, lock)
    return None


def _lock_path(gpu: GpuInfo) -> Path:
    # A lock for all users of the machine would need a shared, writable folder, so each user has locks of their own.
    return Path(tempfile.gettempdir()) / f"attn_exp-{os.getuid()}-{gpu.uuid}.lock"
