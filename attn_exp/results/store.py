"""Store: what a sweep's folder says without its results: whether a job is done, and the sweep's identity."""

import contextlib
import hashlib
import os
import re
import uuid
from pathlib import Path

from attn_exp.core.errors import is_inside
from attn_exp.core.files import owner_mark
from attn_exp.core.record import Record, Request, sound_record

IDENTITY_NAME = "sweep.id"


def done_record(request: Request, folder: Path) -> Record | None:
    """The record of a job in its folder if it need not run again, else None.

    It is missing, broken, of a failure worth a retry, or lacks the profile of a profiler that is asked for; or it is
    another job's, or lies elsewhere, the folder being a link.
    """
    record = sound_record(folder) if is_inside(folder, folder.parent) else None
    if record is None or not record.final or record.request.job != request.job:
        return None
    # Only what could be measured is profiled.
    return None if record.status == "ok" and record.lacking(request) else record


def sweep_identity(folder: Path) -> str:
    """What tells a sweep from any other, wherever its folder is moved or mounted: made once, kept in the folder.

    Of a folder that cannot be written and has none it is made of the folder's place.
    """
    path = folder / IDENTITY_NAME
    temporary = folder / f".{IDENTITY_NAME}.{owner_mark()}"
    with contextlib.suppress(OSError):
        if not path.exists():
            temporary.write_text(f"{uuid.uuid4().hex}\n")
            try:
                # Whole or not at all, and the first of several processes wins.
                os.link(temporary, path)
            finally:
                temporary.unlink()
    try:
        found = path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        found = ""
    return found if re.fullmatch("[0-9a-f]{32}", found) else place_identity(folder)


def place_identity(folder: Path) -> str:
    """What stands for a sweep whose folder could not be given an identity of its own: the folder's place."""
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]


def near(folder: Path) -> Path:
    """The folder as one would type it from here."""
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
