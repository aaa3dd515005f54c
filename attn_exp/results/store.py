"""Store: whether a job's folder is done, and the identity of a sweep's folder."""

import contextlib
import hashlib
import re
import uuid
from pathlib import Path

from attn_exp.core.errors import is_inside
from attn_exp.core.files import SHORT_BYTES, read_whole, short_text, write_first, write_whole
from attn_exp.core.record.file import sound_record
from attn_exp.core.record.record import METHOD_VERSION, Record
from attn_exp.core.record.request import Request
from attn_exp.core.source import identity
from attn_exp.results.there import HOME

IDENTITY_NAME = "sweep.id"
PLANNED_NAME = "planned.txt"
_DIGITS = 10


def done_record(request: Request, folder: Path) -> Record | None:
    """Return the record of a job that need not run again, or None.

    A job runs again if its record is missing, broken, another's, of another method, of a failure that is retried, of
    another source of the backend, or without a requested profile, or if the folder is a link that leads elsewhere.
    """
    record = sound_record(folder) if is_inside(folder, folder.parent) else None
    if record is None or not record.final or record.request.job != request.job:
        return None
    if record.method_version != METHOD_VERSION:
        return None
    if identity(record.request.source) != identity(request.source):
        # `attn-exp worker` measures a job's folder again with the source as it is then.
        return None
    # Only jobs that could be measured are profiled.
    return None if record.status == "ok" and record.lacking(request) else record


def keep_planned(folder: Path, jobs: int) -> None:
    """Write into a sweep's folder how many jobs its last command is for: one that is added to a sweep is no plan."""
    if jobs < 2:
        return
    with contextlib.suppress(OSError):
        write_whole(folder / PLANNED_NAME, f"{jobs}\n".encode(), lasting=False)


def planned_jobs(folder: Path) -> int | None:
    """Return how many jobs the last command of a sweep was for; None if that is unknown."""
    text = short_text(folder / PLANNED_NAME)
    return int(text) if text.isascii() and text.isdecimal() and len(text) < _DIGITS else None


def sweep_identity(folder: Path) -> str:
    """Return what identifies a sweep wherever its folder is moved or mounted: generated once, stored in it.

    For a folder that cannot be written and has no identity yet, it is derived from the folder's path.
    """
    path = folder / IDENTITY_NAME
    with contextlib.suppress(OSError):
        if not path.exists():
            write_first(path, f"{uuid.uuid4().hex}\n".encode())
    try:
        identity = read_whole(path, SHORT_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError):
        identity = ""
    return identity if re.fullmatch("[0-9a-f]{32}", identity) else place_identity(folder)


def place_identity(folder: Path) -> str:
    """Return the identity of a sweep whose folder cannot store one, derived from the folder's path."""
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]


def sweep_words(folder: Path) -> list[str]:
    """Return the words by which `attn-exp compare` and the like find a sweep's folder from the current directory."""
    folder = folder.resolve()
    place = [] if folder.parent == Path(HOME).resolve() else [f"folder={user_path(folder.parent)}"]
    return [folder.name, *place]


def user_path(folder: Path) -> Path:
    """Return the folder relative to the current directory if it is inside, as a user would type it."""
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
