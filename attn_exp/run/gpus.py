"""The GPUs of this host that may be used, and a lease so that two processes never time on the same one."""

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from attn_exp.core.errors import UserError
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
    return private_folder() / f"{gpu.uuid}.lock"


def private_folder() -> Path:
    """Return this user's folder for locks; all processes of the user find the same, and no other user can write there.

    A lock for all users of the machine would need a folder that all can write to: others could hold locks for ever, or
    put links in their places.

    Raises:
        UserError: something else is in its place, possibly somebody else's.
    """
    folder = Path(tempfile.gettempdir()) / f"attn_exp-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    there = folder.lstat()
    if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.getuid() or there.st_mode & 0o022:
        raise UserError(f"{folder} is not a folder that only you can write to: remove it, or set TMPDIR=FOLDER")
    return folder
