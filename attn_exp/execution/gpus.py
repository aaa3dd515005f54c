"""The GPUs of this host that may be used, and a lease so that two processes never time on the same one."""

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from filelock import BaseFileLock, Timeout

from attn_exp.core.errors import UserError
from attn_exp.core.host.lacking import hold
from attn_exp.core.host.nvml import GpuInfo

# How long a GPU is waited for unless `gpu_wait_s` says so: a sweep may be queued behind others overnight.
WAIT_S = 86400.0


@dataclass(frozen=True)
class Lease:
    """The right to time on one GPU. It is a file lock, so it ends with the process in any case."""

    gpu: GpuInfo
    lock: BaseFileLock

    def release(self) -> None:
        """Release the GPU."""
        self.lock.release()


def lease(gpus: list[GpuInfo], waiting: Callable[[str], None], limit_s: float = WAIT_S) -> Lease:
    """Lease the first free GPU; if all are taken, say so through `waiting` and wait for the first one.

    Raises UserError if it is still taken after `limit_s`, or something else is in the place of its lock's file.
    """
    free = try_lease(gpus)
    if free is not None:
        return free
    gpu = gpus[0]
    waiting(f"waiting for GPU {gpu.index} ({gpu.name}), on which another attn_exp is measuring")
    held = _locked(gpu, limit_s)
    if held is None:
        raise UserError(held_too_long(gpu, limit_s))
    return held


@contextlib.contextmanager
def leased(
    device: str, gpus: list[GpuInfo], environment: MutableMapping[str, str], waiting: Callable[[str], None]
) -> Iterator[GpuInfo | None]:
    """Lease a GPU for a block and show only that one to processes with this environment; None on a CPU."""
    if device != "cuda":
        yield None
        return
    held = lease(gpus, waiting)
    environment["CUDA_VISIBLE_DEVICES"] = held.gpu.uuid
    try:
        yield held.gpu
    finally:
        held.release()


def held_too_long(gpu: GpuInfo, limit_s: float) -> str:
    """Return the sentence about a GPU that was waited for in vain: what to type."""
    return (
        f"GPU {gpu.index} ({gpu.name}) is held by another attn_exp for {limit_s:g} s: end that, choose "
        "another with device=cuda:N or CUDA_VISIBLE_DEVICES, or set gpu_wait_s="
    )


def try_lease(gpus: list[GpuInfo]) -> Lease | None:
    """Lease the first free GPU; return None if all are taken."""
    return next(filter(None, (_locked(gpu, 0.0) for gpu in gpus)), None)


def _locked(gpu: GpuInfo, limit_s: float) -> Lease | None:
    """Lease a GPU; return None if it is still taken after `limit_s`."""
    path = _lock_path(gpu)
    try:
        lock = hold(path, limit_s)
    except Timeout:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be locked ({error.strerror}): remove it, or set TMPDIR=FOLDER") from error
    return Lease(gpu, lock)


def _lock_path(gpu: GpuInfo) -> Path:
    return private_folder() / f"{gpu.uuid}.lock"


def private_folder() -> Path:
    """Return this user's folder for locks; all processes of the user find the same, and no other user can write there.

    Others could hold the locks of a common folder for ever. Raises UserError if something else is in its place.
    """
    folder = Path(tempfile.gettempdir()) / f"attn_exp-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    there = folder.lstat()
    if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.getuid() or there.st_mode & 0o022:
        raise UserError(f"{folder} is not a folder that only you can write to: remove it, or set TMPDIR=FOLDER")
    return folder
