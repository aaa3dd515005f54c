"""Files written atomically and read safely, and temporary files, whose names say which process made them.

The folder of a sweep may be somebody else's: what is written into it stays in it, and what is read from it ends.
The process that makes a temporary file or folder holds a lock on it: containers may share folders and a host name, and
yet not see each other's processes.
"""

import atexit
import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from attn_exp.core.errors import is_inside
from attn_exp.core.process import pid_namespace
from attn_exp.core.profile import FOLDER as PROFILES

# The umask of a process whose files only its user may read.
PRIVATE = 0o077
_OWNER = re.compile(r"@([^@]*)@(\d*)\.(\d+)@")


def owner_mark() -> str:
    """Return the mark of this host, namespace of process numbers and process for a temporary file's name."""
    return f"@{os.uname().nodename}@{pid_namespace()}.{os.getpid()}@"


def write_whole(path: Path, content: bytes, *, lasting: bool = True) -> None:
    """Write a file atomically: a reader never sees half of it, if it is `lasting` even after a power failure.

    A link, a pipe or an empty folder in its place is replaced and not written to.
    """

    def place(temporary: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        temporary.replace(path)

    _write(path, content, place, lasting=lasting)


def write_first(path: Path, content: bytes) -> None:
    """Write a file atomically, unless it is there: the first of several processes wins. Raises OSError."""

    def place(temporary: Path) -> None:
        os.link(temporary, path)
        temporary.unlink()

    _write(path, content, place, lasting=True)


def _write(path: Path, content: bytes, place: Callable[[Path], object], *, lasting: bool) -> None:
    """Write a temporary file beside `path`, and let `place` give it that name while it is locked."""
    # The token, because processes in two containers may have the same number, 1 for instance.
    temporary = path.with_name(f".{path.name}{owner_mark()}{secrets.token_hex(4)}")
    # Exclusively: no link is followed.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, 0o666), "wb") as file:
            _lock(file.fileno())
            if not os.fstat(file.fileno()).st_nlink:
                # It was removed as litter before it was locked.
                _write(path, content, place, lasting=lasting)
                return
            file.write(content)
            file.flush()
            if lasting:
                os.fsync(file.fileno())
            place(temporary)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


# More than a command that the system starts (ARG_MAX is 2 MiB), for files that hold one, or a word.
SHORT_BYTES = 4 << 20


def short_text(path: Path) -> str:
    """Return the text of a file that holds a command or a word; empty if it cannot be read, or is a link elsewhere."""
    try:
        return read_whole(path, SHORT_BYTES).decode().strip() if is_inside(path, path.parent) else ""
    except (OSError, UnicodeDecodeError):
        return ""


def read_whole(path: Path, most: int | None = None) -> bytes:
    """Return a file's content.

    Raises OSError, also for a pipe or a device, whose reading might never end, and for more than `most` bytes.
    """
    # Opening a pipe to read waits for a writer otherwise.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a file", str(path))
        if most is not None and os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
        return file.read()


def cut_middle(path: Path, most: int) -> None:
    """Leave of a file that has more than `most` bytes its beginning and its end, and a line that says so between."""
    with contextlib.suppress(OSError), open(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= most or not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return
        file.seek(size - most // 2)
        end = file.read()
        file.seek(most // 2)
        file.write(f"\n... {size - most} bytes were left out here ...\n".encode() + end)
        file.truncate()


def rewrite(path: Path, changed: Callable[[str], str]) -> None:
    """Replace a file by what `changed` makes of its text, if that is different; do nothing if it cannot be read."""
    with contextlib.suppress(OSError):
        if path.is_symlink():
            return
        text = read_whole(path).decode(errors="surrogateescape")
        if (new := changed(text)) != text:
            write_whole(path, new.encode(errors="surrogateescape"), lasting=False)


def be_as_private_as(folder: Path) -> None:
    """Let nobody else read what this process and its children make from now on, if nobody may enter the folder."""
    if not folder.stat().st_mode & 0o077:
        os.umask(PRIVATE)


def unlinked(path: Path) -> Path:
    """Return a path to write to. Raises OSError if it is a link, which may lead anywhere."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link, and nothing is written through one", str(path))
    return path


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all that it contains, if it is there. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder that is removed at the end, by `remove_litter` if the process is killed before."""
    made = Path(tempfile.mkdtemp(prefix="attn_exp-new_"))
    # Named as a temporary folder only when it is locked.
    folder = made.with_name(f"attn_exp_{owner_mark()}{made.name.removeprefix('attn_exp-new_')}")
    held = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(held)
        made.rename(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def folder_until_exit() -> Path:
    """Make a temporary folder that is removed when this process ends."""
    stack = contextlib.ExitStack()
    folder = stack.enter_context(temporary_folder())
    atexit.register(stack.close)
    return folder


def remove_litter(paths: Iterable[Path]) -> None:
    """Remove those of `paths` that a process of this host made and can no longer use, because it has ended."""
    for path in paths:
        owner = _OWNER.search(path.name)
        if owner is None or owner[1] != os.uname().nodename:
            continue
        elsewhere = owner[2] != pid_namespace()
        if not elsewhere and Path("/proc", owner[3]).exists():
            continue
        with _kept_free(path) as is_free:
            # Of a process in another namespace, nothing but its lock tells whether it lives.
            if is_free is False or (is_free is None and elsewhere):
                continue
            # The file may belong to another user.
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)


def hidden_files(folder: Path) -> list[Path]:
    """Return the hidden files of a sweep's folder, its jobs and their profiles, where `write_whole` makes its own."""
    return [path for pattern in (".*", "*/.*", f"*/{PROFILES}/.*") for path in folder.glob(pattern)]


def _lock(opened: int) -> None:
    """Hold the lock of an opened file or folder until it is closed, where the file system has locks."""
    with contextlib.suppress(OSError):
        # The process that has it is about to remove the file, and does not take long.
        fcntl.flock(opened, fcntl.LOCK_EX)


@contextlib.contextmanager
def _kept_free(path: Path) -> Iterator[bool | None]:
    """Yield whether no process holds the lock of a file or folder; if so, none can take it within.

    None if that cannot be known: a file that cannot be read, or a file system without locks.
    """
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    is_free: bool | None
    try:
        # Shared, because NFS locks a file exclusively only for those who may write to it.
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        is_free = True
    except OSError as error:
        is_free = False if isinstance(error, BlockingIOError) else None
    try:
        yield is_free
    finally:
        os.close(opened)
