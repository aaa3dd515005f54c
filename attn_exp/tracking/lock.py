"""Writers: processes that store into one sweep's runs at once, so that two never store one job."""

import contextlib
import fcntl
import os
import secrets
import zlib
from collections.abc import Iterator
from pathlib import Path

LOCK_NAME = ".mlflow.lock"
_TOKEN_BYTES = 16
# Bytes of the lock file: first the token of whoever stored last, a byte to lock while that is read or written, then a
# byte to lock for each thing that is stored.
_TOKEN_LOCK, _FIRST_LOCK = 512, 1024


class Writers:
    """One tracker among those that store the sweep in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_NAME
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._others = False

    @contextlib.contextmanager
    def alone(self, what: str) -> Iterator[bool]:
        """Hold `what` against other processes; whether others may have stored since this one looked.

        The kernel lets go of it when the process ends, however it ends. Where the folder cannot be written there is
        nothing to hold, and others may always have stored.
        """
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError:
            yield True
            return
        try:
            _lock(file, _FIRST_LOCK + zlib.crc32(what.encode()))
            self._mark(file)
            yield self._others
            # Again, so that whoever looked meanwhile learns of it.
            self._mark(file)
        finally:
            os.close(file)

    def looked(self) -> None:
        """What was stored until now is known; to be called with something held."""
        self._others = False

    def _mark(self, file: int) -> None:
        """Leave our token as the last one; another one there says that others have stored."""
        _lock(file, _TOKEN_LOCK)
        self._others = self._others or os.pread(file, _TOKEN_BYTES, 0) not in (b"", self._token)
        os.pwrite(file, self._token, 0)
        with contextlib.suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_UN, 1, _TOKEN_LOCK)


def _lock(file: int, byte: int) -> None:
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.lockf(file, fcntl.LOCK_EX, 1, byte)
