"""Keep: the page and the roofline of every profiled job of a sweep, beside its profiles."""

import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_exp.charts.style import available
from attn_exp.compare.grouping import way
from attn_exp.compare.read import read_folder
from attn_exp.compare.result import Result
from attn_exp.errors import UserError
from attn_exp.explain.find import Found
from attn_exp.explain.page import job_page
from attn_exp.explain.picture import write_picture
from attn_exp.profile import FOLDER
from attn_exp.record import write_whole

PAGE = "explain.txt"
# No further picture is begun after so long; a page takes milliseconds.
LIMIT_S = 5.0


@dataclass(frozen=True)
class Kept:
    """The files of one job, by the name of its folder."""

    job: str
    files: tuple[Path, ...]


def keep_pages(folder: Path, *, pictures: bool) -> list[Kept]:
    """Write `explain.txt` and `roofline.svg` and `.png` into the `profiles/` of every job of a sweep that has one."""
    began, kept = time.monotonic(), []
    rivals: dict[Any, list[Result]] = defaultdict(list)
    results = read_folder(folder).results
    for result in results:
        # Every page looks at its own rivals alone: a thousand times a thousand is a million.
        rivals[result.case, way(result), result.device_name].append(result)
    for job in results:
        same = rivals[job.case, way(job), job.device_name]
        own = job.path.parent / FOLDER
        if job.status != "ok" or not own.is_dir():
            continue
        write_whole(own / PAGE, f"{job_page(job, same)}\n".encode())
        files = [own / PAGE]
        if pictures and available() and time.monotonic() - began < LIMIT_S:
            files += _picture(job, tuple(same), own)
        kept.append(Kept(job.job, tuple(files)))
    return kept


def _picture(job: Result, results: tuple[Result, ...], folder: Path) -> list[Path]:
    try:
        return write_picture(Found(results, job), folder)
    except UserError:
        return []
