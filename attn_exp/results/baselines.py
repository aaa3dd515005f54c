"""Baselines: copies of a sweep's records, kept under a name beside the folder of sweeps."""

import contextlib
import os
import tempfile
import time
from pathlib import Path

from attn_exp.core.errors import UserError, check_name
from attn_exp.core.files import read_whole, write_whole
from attn_exp.core.record.file import FILE_NAME
from attn_exp.results.read import Sweep
from attn_exp.results.store import PLANNED_NAME
from attn_exp.results.there import baselines_of

_COMMAND = "command.txt"


def keep_baseline(sweep: Sweep, name: str, home: Path, *, replace: bool = False) -> Path:
    """Copy a sweep's records into the baseline `name` beside `home`, the folder of sweeps, and return its path.

    Raises UserError if the name is taken, the sweep is not in a folder or has files that are no records, or nothing can
    be written there.
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
        if os.path.lexists(target) and not replace:
            saved = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(target.lstat().st_mtime))
            raise UserError(
                f"there is a baseline '{name}' already, saved {saved}: write replace=true to overwrite it, or "
                "choose another name"
            )
        with tempfile.TemporaryDirectory(dir=place, prefix=".") as new:
            _copy(sweep, Path(new) / name)
            if os.path.lexists(target):
                target.rename(Path(new) / "before")
            (Path(new) / name).rename(target)
    except OSError as error:
        raise UserError(f"cannot write the baseline {target} ({error.strerror}): check its folder") from error
    return target


def _copy(sweep: Sweep, version: Path) -> None:
    for result in sweep.results:
        job = version / result.path.parent.name
        job.mkdir(parents=True)
        write_whole(job / FILE_NAME, read_whole(result.path))
    for name in (_COMMAND, PLANNED_NAME):
        with contextlib.suppress(FileNotFoundError):
            write_whole(version / name, read_whole(Path(sweep.place) / name))
