"""What a host may lack, with what is done instead: kernels before 5.3, strict containers, NFS, FAT and FUSE.

The children of a process are listed by process.py, which also runs without this package.
"""

import contextlib
import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import BaseFileLock

_LACKING = (errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


def end_of_process(pid: int) -> int | None:
    """Return a file descriptor that can be read when a process has ended; None where the caller has to look itself.

    Raises ProcessLookupError if there is no such process.
    """
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno not in _LACKING:
            raise
        return None


def sync(file: int) -> None:
    """Wait until a file's content is on the disk, if its file system can say so. Raises OSError if it cannot be."""
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in _LACKING:
            raise


def place_first(temporary: Path, path: Path) -> None:
    """Give a file a name that no file may have. Raises FileExistsError if one has it."""
    try:
        os.link(temporary, path)
        temporary.unlink()
    except OSError as error:
        if error.errno not in _LACKING:
            raise
        # The name is taken empty, so that one of several processes wins.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
        temporary.replace(path)


def make_private(folder: Path) -> None:
    """Let only its owner enter a folder. Raises OSError where others can and modes cannot be changed."""
    with contextlib.suppress(PermissionError):
        folder.chmod(0o700)
    if folder.stat().st_mode & 0o077:
        raise OSError(errno.EPERM, "its file system cannot keep others out, as private=true asks", str(folder))


def hold(path: Path, timeout_s: float = -1) -> "BaseFileLock":
    """Return a lock that is held, which the system lets go of when this process ends.

    Without flock(2) it is a file that names its holder: one that was left by a dead process of this host is taken over.
    Raises filelock's Timeout, and OSError if no file can be made.
    """
    from filelock import FileLock, SoftFileLock

    lock: BaseFileLock = FileLock(path, timeout=timeout_s)
    try:
        lock.acquire()
    except OSError as error:
        if error.errno not in _LACKING:
            raise
        lock = SoftFileLock(f"{path}.held", timeout=timeout_s)
        lock.acquire()
    return lock
