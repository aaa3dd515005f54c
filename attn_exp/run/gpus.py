"""The GPUs of this host that may be used, and a lease so that two processes never time on the same one."""

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from attn_exp.core.errors import UserError
from attn_exp.core.files import unlinked
from attn_exp.core.nvml import GpuInfo, list_gpus
from attn_exp.core.redaction import without_secrets
from attn_exp.core.text import printable

# How long a GPU is waited for unless `gpu_wait_s` says so: a sweep may be queued behind others overnight.
WAIT_S = 86400.0
_LONGEST_SHOWN = 120


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


def lease(gpus: list[GpuInfo], waiting: Callable[[str], None], limit_s: float = WAIT_S) -> Lease:
    """Lease the first free GPU; if all are taken, say so through `waiting` and wait for the first one.

    Raises:
        UserError: it is still taken after `limit_s`, or something else is in the place of its lock's file.
    """
    free = try_lease(gpus)
    if free is not None:
        return free
    gpu = gpus[0]
    path = _lock_path(gpu)
    waiting(f"waiting for GPU {gpu.index} ({gpu.name}), on which {holder(path)} is measuring")
    held = _locked(gpu, limit_s)
    if held is None:
        raise UserError(held_too_long(gpu, limit_s))
    return held


def held_too_long(gpu: GpuInfo, limit_s: float) -> str:
    """Return the sentence about a GPU that was waited for in vain: who holds it, and what to type."""
    return (
        f"GPU {gpu.index} ({gpu.name}) is held by {holder(_lock_path(gpu))} for {limit_s:g} s: end that, choose "
        "another with device=cuda:N or CUDA_VISIBLE_DEVICES, or set gpu_wait_s="
    )


def holder(path: Path) -> str:
    """Return which process holds a file's lock: its number, its command, and whether it is stopped."""
    pid = _holding(path)
    try:
        words = Path("/proc", str(pid), "cmdline").read_bytes().decode(errors="replace").split("\0")
        state = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        # In another PID namespace, or gone meanwhile.
        return "another attn_exp"
    command = printable(without_secrets(" ".join(words).strip()))
    shown = command if len(command) <= _LONGEST_SHOWN else f"{command[:_LONGEST_SHOWN]}..."
    return f"process {pid} ({shown}){f', stopped (kill -CONT {pid} continues it),' if state == 'T' else ''}"


def _holding(path: Path) -> int:
    """Return the process that the kernel lists as the holder of a file's lock, 0 if it lists none."""
    with contextlib.suppress(OSError):
        inode = path.stat().st_ino
        for line in Path("/proc/locks").read_text().splitlines():
            # "1: FLOCK ADVISORY WRITE 1234 08:01:5678 0 EOF"; one that waits has "->" in the second place.
            words = line.split()
            if len(words) > 5 and words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(inode):
                return int(words[4])
    return 0


def try_lease(gpus: list[GpuInfo]) -> Lease | None:
    """Lease the first free GPU; return None if all are taken."""
    return next(filter(None, (_locked(gpu, 0.0) for gpu in gpus)), None)


def _locked(gpu: GpuInfo, limit_s: float) -> Lease | None:
    """Lease a GPU; return None if it is still taken after `limit_s`."""
    path = _lock_path(gpu)
    try:
        lock = FileLock(unlinked(path))
        lock.acquire(timeout=limit_s)
    except Timeout:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be locked ({error.strerror}): remove it, or set TMPDIR=FOLDER") from error
    return Lease(gpu, lock)


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
