"""Samples of the program counter by source line, of kernels that Triton compiled."""

import csv
import inspect
import sys
from dataclasses import astuple, fields, replace
from pathlib import Path
from typing import Any

import torch

from attn_exp.backends.package import Unavailable
from attn_exp.core.profile import Profile
from attn_exp.profilers.base import Subject
from attn_exp.profilers.hatchet import Line, lines_of, read_tree
from attn_exp.profilers.proton_session import begin, load_proton, run_passes, version

_TREE, _TABLE = "lines.hatchet", "lines.csv"


class ProtonLines:
    """Samples `calls` calls of each pass, in a process of its own that has loaded no kernel yet.

    Proton reads the lines of a kernel when the driver loads it, and only while it samples. Of kernels that were loaded
    before it knows only the names (`CUPTI_CBID_RESOURCE_MODULE_LOADED` in its CuptiProfiler.cpp).
    """

    def __init__(self, name: str, calls: int = 10) -> None:
        self.name, self.calls = name, calls
        self._proton: Any = None
        self._session: Any = None

    def begin(self, folder: Path) -> None:
        """Start sampling.

        Raises:
            Unavailable: Triton's profiler is missing, or cannot sample.
        """
        self._proton = load_proton()
        if "mode" not in inspect.signature(self._proton.start).parameters:
            raise Unavailable(f"Triton {version()} has no PC sampling")
        # Proton samples only kernels of the thread that started the session; autograd launches from threads of its own.
        torch.autograd.set_multithreading_enabled(False)
        self._session = begin(self._proton, folder / _TREE, mode="pcsampling")

    def profile(self, subject: Subject) -> Profile:
        """Write the tree as `lines.hatchet`, and `lines.csv`.

        Raises:
            HatchetError: the tree cannot be read.
        """
        try:
            run_passes(self._proton, subject, self.calls)
        finally:
            self._proton.finalize(self._session)
        root = read_tree(subject.folder / _TREE)
        lines = [line for direction in subject.calls for line in lines_of(root, direction)]
        placed = [replace(line, place=as_imported(line.place)) for line in lines]
        if not placed:
            return Profile(
                status="failed", reason="PC sampling took no samples of the passes", files=subject.kept(_TREE)
            )
        _write(placed, subject.folder / _TABLE)
        known = any(line.place for line in placed)
        return Profile(
            status="ok",
            reason=None if known else "PC sampling knew no line of source: lines.csv has samples by kernel",
            files=subject.kept(_TREE, _TABLE),
        )


def as_imported(place: str) -> str:
    """Return a place in a source file without its import folder: `triton/language/core.py:7@kernel`."""
    for folder in sorted(filter(None, sys.path), key=len, reverse=True):
        if place.startswith(f"{folder.rstrip('/')}/"):
            return place[len(folder.rstrip("/")) + 1 :]
    return place


def _write(lines: list[Line], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([field.name for field in fields(Line)])
        writer.writerows(astuple(line) for line in lines)
