"""Files written atomically, and temporary files that were left behind: their names say which process made them."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from attn_exp.core.profile import FOLDER as PROFILES

_OWNER = re.compile(r"@([^@]*)@(\d+)@")


def owner_mark() -> str:
    """Return the mark of this host and process for a temporary file's name."""
    return f"@{os.uname().nodename}@{os.getpid()}@"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: a reader never sees half of it, even after a power failure."""
    temporary = path.with_name(f".{path.name}{owner_mark()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def remove_litter(paths: Iterable[Path]) -> None:
    """Remove those of `paths` that an ended process of this host made."""
    for path in paths:
        owner = _OWNER.search(path.name)
        if owner is None or owner[1] != os.uname().nodename or Path("/proc", owner[2]).exists():
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
            continue
        # The file may belong to another user.
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def hidden_files(folder: Path) -> list[Path]:
    """Return the hidden files of a sweep's folder, its jobs and their profiles, where `write_whole` makes its own."""
    return [path for pattern in (".*", "*/.*", f"*/{PROFILES}/.*") for path in folder.glob(pattern)]
