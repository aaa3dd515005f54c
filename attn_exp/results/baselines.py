"""Baselines: copies of a sweep's records, kept under a name beside the folder of sweeps."""

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from attn_exp.core.errors import UserError, check_name
from attn_exp.core.files import read_whole, remove, write_whole
from attn_exp.core.record_file import FILE_NAME
from attn_exp.results.read import Sweep
from attn_exp.results.store import PLANNED_NAME
from attn_exp.results.there import baselines_of

_COMMAND = "command.txt"


def keep_baseline(sweep: Sweep, name: str, home: Path, *, replace: bool = False) -> Path:
    """Copy a sweep's records into the baseline `name` beside `home`, the folder of sweeps, and return its path.

    The path is a link to a hidden folder, so that another process reads the earlier baseline or the new one, never a
    part of either; the one before is kept until the next time, for those that still read it.

    Raises:
        UserError: the name is taken and `replace` is not set, the sweep has files that are no records or is not in a
            folder, or the baseline cannot be written.
    """
    check_name("save", name)
    if not Path(sweep.place).is_dir():
        raise UserError(f"{sweep.name} is in {sweep.place}: a baseline is made of a sweep's folder")
    if sweep.broken:
        raise UserError(f"{sweep.name} is no baseline, {sweep.broken[0]}: measure it again, or remove the file")
    if (home / name).is_dir():
        raise UserError(f"save={name} is the name of a sweep in {home}: choose another for the baseline")
    place = baselines_of(home)
    target = place / name
    try:
        place.mkdir(parents=True, exist_ok=True)
        with FileLock(place / ".lock"):
            if os.path.lexists(target) and not replace:
                saved = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(target.lstat().st_mtime))
                raise UserError(
                    f"there is a baseline '{name}' already, saved {saved}: write replace=true to overwrite it, or "
                    "choose another name"
                )
            with _unless_whole(place / f".{name}-{secrets.token_hex(4)}") as version:
                _copy(sweep, version)
                before = _version_of(target)
                _point(target, version)
            _forget(name, place, {version.name, before})
    except OSError as error:
        raise UserError(f"cannot write the baseline {target} ({error.strerror}): check its folder") from error
    return target


def _copy(sweep: Sweep, version: Path) -> None:
    for result in sweep.results:
        job = version / result.path.parent.name
        job.mkdir()
        write_whole(job / FILE_NAME, read_whole(result.path))
    for name in (_COMMAND, PLANNED_NAME):
        with contextlib.suppress(FileNotFoundError):
            write_whole(version / name, read_whole(Path(sweep.place) / name))


@contextlib.contextmanager
def _unless_whole(version: Path) -> Iterator[Path]:
    """Make a folder, which is removed again if the block does not end."""
    version.mkdir()
    try:
        yield version
    except BaseException:
        shutil.rmtree(version, ignore_errors=True)
        raise


def _point(target: Path, version: Path) -> None:
    """Make `target` a link to a version. What was copied there as a folder makes room first."""
    link = version.with_name(f"{version.name}-link")
    link.symlink_to(version.name)
    try:
        if target.is_dir() and not target.is_symlink():
            target.rename(version.with_name(f"{version.name}-before"))
        link.replace(target)
    except OSError:
        link.unlink()
        raise


def _version_of(target: Path) -> str:
    """Return the name of the hidden folder that a baseline links to; empty if there is none."""
    return os.readlink(target) if target.is_symlink() else ""


def _forget(name: str, place: Path, kept: set[str]) -> None:
    own = re.compile(rf"\.{re.escape(name)}-[0-9a-f]{{8}}(-before|-link)?")
    for path in place.iterdir():
        if own.fullmatch(path.name) and path.name not in kept:
            with contextlib.suppress(OSError):
                remove(path)
