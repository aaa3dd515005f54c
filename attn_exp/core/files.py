"""Files written atomically and read safely, and temporary files, whose names say which process made them.

The folder of a sweep may be somebody else's: what is written into it stays in it, and what is read from it ends.
The process that makes a temporary file or folder holds a lock on it. Containers may share folders and a host name
without seeing each other's processes.
"""

import atexit
import contextlib
import errno
import functools
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from attn_exp.core.errors import is_inside
from attn_exp.core.host.lacking import place_first, sync
from attn_exp.core.host.process import pid_namespace

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
    _write(path, content, lambda temporary: place_first(temporary, path), lasting=True)


def _write(path: Path, content: bytes, place: Callable[[Path], object], *, lasting: bool) -> None:
    """Write a temporary file beside `path`, and let `place` give it that name."""
    # The token, because processes in two containers may have the same number, 1 for instance.
    temporary = path.with_name(f".{path.name}{owner_mark()}{secrets.token_hex(4)}")
    # Exclusively: no link is followed.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, 0o666), "wb") as file:
            file.write(content)
            file.flush()
            if lasting:
                sync(file.fileno())
            place(temporary)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def own_folder(path: Path) -> Path:
    """Return a folder that is there and no link: what is written below it stays below its parent. Raises OSError."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        path.unlink()
    path.mkdir(exist_ok=True)
    return path


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
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(OSError), open(os.open(path, flags), "r+b", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= most or not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return
        file.seek(size - most // 2)
        end = file.read()
        # First, so that a full disk has room for the end.
        file.truncate(most // 2)
        file.seek(most // 2)
        file.write(f"\n... {size - most} bytes were left out here ...\n".encode() + end)


def rewrite(path: Path, changed: Callable[[str], str]) -> None:
    """Replace a file by what `changed` makes of its text, if that is different; do nothing if it cannot be read."""
    with contextlib.suppress(OSError):
        if path.is_symlink():
            return
        text = read_whole(path).decode(errors="surrogateescape")
        if (new := changed(text)) != text:
            write_whole(path, new.encode(errors="surrogateescape"), lasting=False)


def is_private(folder: Path) -> bool:
    """Return whether a folder is there that nobody else may enter."""
    return folder.is_dir() and not folder.stat().st_mode & 0o077


def be_as_private_as(folder: Path) -> None:
    """Let nobody else read what this process and its children make from now on, if nobody may enter the folder."""
    if is_private(folder):
        os.umask(PRIVATE)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all that it contains, if it is there. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder that is removed at the end, by `remove_litter` if the process is killed before."""
    folder = Path(tempfile.mkdtemp(prefix=f"attn_exp_{owner_mark()}"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def folder_until_exit() -> Path:
    """Make a temporary folder that is removed when this process ends."""
    return _until_exit().enter_context(temporary_folder())


def remove_folders_until_exit() -> None:
    """Remove what `folder_until_exit` made, before an end that calls no exit handlers (`os._exit`)."""
    _until_exit().close()


@functools.cache
def _until_exit() -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack


def remove_litter(paths: Iterable[Path]) -> None:
    """Remove those of `paths` whose process was one of this host and container, and has ended."""
    for path in paths:
        owner = _OWNER.search(path.name)
        if owner is None or (owner[1], owner[2]) != (os.uname().nodename, pid_namespace()):
            continue
        if Path("/proc", owner[3]).exists():
            continue
        # The file may belong to another user.
        with contextlib.suppress(OSError):
            remove(path)


def hidden_files(folder: Path) -> list[Path]:
    """Return the hidden files of a sweep's folder, its jobs and their profiles, where `write_whole` makes its own."""
    return [path for pattern in (".*", "*/.*", "*/*/.*") for path in folder.glob(pattern)]
