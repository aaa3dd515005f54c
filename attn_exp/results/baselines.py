"""Baselines: copies of the records of one or more sweeps, kept under a name beside the folder of sweeps."""

import contextlib
import os
import tempfile
from pathlib import Path

from attn_exp.core.errors import UserError, check_name
from attn_exp.core.files import read_whole, write_whole
from attn_exp.core.record.file import FILE_NAME
from attn_exp.results.read import Sweep, read_folder
from attn_exp.results.store import PLANNED_NAME
from attn_exp.results.there import baselines_of

_COMMAND = "command.txt"
_EARLIER = ".earlier"
MOST_RUNS = 10  # that a baseline keeps, and that count of each cell


def keep_baseline(sweep: Sweep, name: str, home: Path, *, replace: bool = False) -> Path:
    """Copy a sweep's records into the baseline `name` beside `home`, the folder of sweeps, and return its path.

    Its earlier runs stay, but for `replace`. Raises UserError if the sweep is not in a folder or has files that are no
    records, or nothing can be written there.
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
        with tempfile.TemporaryDirectory(dir=place, prefix=".") as new:
            _copy(sweep, Path(new) / name)
            if os.path.lexists(target):
                runs = [] if replace else runs_of(read_folder(target, may_be_empty=True))
                for index, run in enumerate([run for run in runs if run.when != sweep.when][1 - MOST_RUNS :]):
                    _copy(run, Path(new) / name / _EARLIER / f"{name}-{index}")
                target.rename(Path(new) / "before")
            (Path(new) / name).rename(target)
    except OSError as error:
        raise UserError(f"cannot write the baseline {target} ({error.strerror}): check its folder") from error
    return target


def runs_of(sweep: Sweep) -> list[Sweep]:
    """Return the runs of a baseline, the oldest first; of a sweep itself alone."""
    return [*map(read_folder, sorted(Path(sweep.place).glob(f"{_EARLIER}/*"))), sweep]


def _copy(sweep: Sweep, version: Path) -> None:
    for result in sweep.results:
        job = version / result.path.parent.name
        job.mkdir(parents=True)
        write_whole(job / FILE_NAME, read_whole(result.path))
    for name in (_COMMAND, PLANNED_NAME):
        with contextlib.suppress(FileNotFoundError):
            write_whole(version / name, read_whole(Path(sweep.place) / name))
