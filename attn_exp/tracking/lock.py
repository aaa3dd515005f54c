"""Locks between processes that store into one sweep's runs, so that no job is stored twice."""

import contextlib
import fcntl
import os
import secrets
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path

LOCK_NAME = ".mlflow.lock"
_TOKEN_BYTES = 16
# Bytes of the lock file: the token of the process that stored last, a byte to lock while it is read or written, then a
# byte to lock for each stored item.
_TOKEN_LOCK, _FIRST_LOCK = 512, 1024


class Writers:
    """One of the processes that store the sweep in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_NAME
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._others = False

    @contextlib.contextmanager
    def exclusive(self, what: str) -> Iterator[bool]:
        """Hold `what` against other processes; yield whether others may have stored since the last `mark_known()`.

        The kernel releases the lock when the process ends for any reason. If the folder cannot be written, or its lock
        is no file, there is no lock, and others may always have stored.
        """
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError:
            yield True
            return
        try:
            there = os.fstat(file)
            if not stat.S_ISREG(there.st_mode) or there.st_size > _TOKEN_BYTES:
                # Somebody's pipe or device in its place, or another file by a second name (a hard link).
                yield True
                return
            _lock(file, _FIRST_LOCK + zlib.crc32(what.encode()))
            self._mark(file)
            yield self._others
            # Again, for processes that called `mark_known` meanwhile.
            self._mark(file)
        finally:
            os.close(file)

    def mark_known(self) -> None:
        """Mark everything stored until now as known. Call this while holding a lock."""
        self._others = False

    def _mark(self, file: int) -> None:
        """Store our token as the last one, and return whether another one was there."""
        _lock(file, _TOKEN_LOCK)
        self._others = self._others or os.pread(file, _TOKEN_BYTES, 0) not in (b"", self._token)
        os.pwrite(file, self._token, 0)
        with contextlib.suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_UN, 1, _TOKEN_LOCK)


def _lock(file: int, byte: int) -> None:
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.lockf(file, fcntl.LOCK_EX, 1, byte)
