"""A disk that fills up: a small tmpfs where mounting is allowed, else a limit on what files may grow to."""

import errno
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

_INSIDE = "DRILL_NAMESPACE"
# Each long log is kept twice with 16 MB.
_SIZE_MB = 192
_NOTHING_BYTES = 64
_REFILLED_S = 0.005


class Disk(Protocol):
    kind: str
    # How the system words it.
    error: str

    def fill(self, processes: Iterable[int]) -> None:
        """Let no more be written: by anybody, or at least by these processes."""

    def empty(self) -> None:
        """Let there be room again."""

    def close(self) -> None:
        """Leave nothing behind."""


class Tmpfs:
    """A file system of its own, filled by a file that takes all the rest: writing fails with ENOSPC."""

    kind = "a tmpfs, ENOSPC"
    error = os.strerror(errno.ENOSPC)

    def __init__(self, folder: Path) -> None:
        self._folder, self._emptied = folder, threading.Event()
        self._keeper = threading.Thread(target=self._keep_full, daemon=True)

    def fill(self, processes: Iterable[int]) -> None:
        self._fill_up()
        self._keeper.start()

    def _fill_up(self) -> None:
        # Allocated, not written: on a busy machine the sweep would end before 192 MB are.
        with (self._folder / "filler").open("ab") as filler:
            size = _SIZE_MB << 20
            while size:
                try:
                    os.posix_fallocate(filler.fileno(), os.fstat(filler.fileno()).st_size, size)
                except OSError:
                    size //= 2

    def _keep_full(self) -> None:
        # A long log that is cut leaves room for the records of all jobs that follow.
        while not self._emptied.wait(_REFILLED_S):
            self._fill_up()

    def empty(self) -> None:
        self._emptied.set()
        if self._keeper.is_alive():
            self._keeper.join()
        (self._folder / "filler").unlink(missing_ok=True)

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self._folder)], check=False)


class Limited:
    """RLIMIT_FSIZE of running processes: writing fails with EFBIG. Ends with them."""

    kind = "RLIMIT_FSIZE, EFBIG"
    error = os.strerror(errno.EFBIG)

    def fill(self, processes: Iterable[int]) -> None:
        for process in processes:
            _, hard = resource.prlimit(process, resource.RLIMIT_FSIZE)
            resource.prlimit(process, resource.RLIMIT_FSIZE, (_NOTHING_BYTES, hard))

    def empty(self) -> None:
        """The next process has no such limit."""

    def close(self) -> None:
        """Nothing was made."""


def into_a_namespace(arguments: list[str]) -> None:
    """Go on in a mount namespace of our own where that is allowed: it takes its mounts along when it ends."""
    unshare = shutil.which("unshare")
    if unshare is None or _INSIDE in os.environ:
        return
    wrapped = [unshare, "--map-root-user", "--mount"]
    if subprocess.run([*wrapped, "true"], capture_output=True, check=False).returncode == 0:
        os.execve(unshare, [*wrapped, sys.executable, *arguments], os.environ | {_INSIDE: "1"})


def make_disk(folder: Path, *, limit: bool) -> Disk:
    """A disk at `folder`, which is made; with `limit` never a mounted one."""
    folder.mkdir()
    if not limit and _INSIDE in os.environ:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={_SIZE_MB}m", "drill", str(folder)]
        if subprocess.run(mount, capture_output=True, check=False).returncode == 0:
            return Tmpfs(folder)
    return Limited()
