"""Profiler `proton`: Triton's profiler, with the work and bytes of each pass, and samples by line of Triton kernels."""

import sys
from dataclasses import astuple, fields, replace
from pathlib import Path
from typing import Any

import torch

from attn_exp.backends.package import Package, Unavailable
from attn_exp.core.files import write_whole
from attn_exp.core.record.profile import TREE, Profile, ProfiledKernel
from attn_exp.core.record.roofline import work_of
from attn_exp.profilers.base import ProcessLost, Subject, csv_text, kernels_csv, profile_apart
from attn_exp.profilers.hatchet import Line, kernels_of, lines_of, rates, read_tree
from attn_exp.timers.call import synchronize

PACKAGE = Package("triton", "triton.profiler", "pip install 'triton>=3.6,<3.8'")
_TABLE = "kernels.csv"
_SAMPLES, _SAMPLED = "lines.hatchet", "lines.csv"


class Proton:
    """Triton's profiler over `calls` calls of each pass, with cold caches before each.

    It runs in a process of its own: PyTorch's profiler keeps CUPTI in a process in which it has traced, and every
    worker has traced, to name kernels. With `lines`, a second process samples Triton kernels by line.
    """

    def __init__(self, name: str, calls: int = 10, lines: bool = True) -> None:
        self.name, self.calls, self.lines = name, calls, lines

    def profile(self, subject: Subject) -> Profile:
        """Write the tree as `proton.hatchet`, which `proton-viewer` shows, `kernels.csv`, and possibly `lines.csv`.

        Raises Unavailable if there is no GPU, or Triton lacks its profiler.
        """
        if subject.device != "cuda":
            raise Unavailable("proton needs an NVIDIA GPU: use profiler=torch on a CPU")
        PACKAGE.load()
        profile = self._apart(subject, "ProtonPasses")
        # Triton compiles some of the job's kernels: the backend declares it, or Inductor generates them.
        of_triton = getattr(subject.backend, "generates_triton", False) or subject.request.compile.mode != "none"
        return self._with_lines(subject, profile) if profile.kernels and self.lines and of_triton else profile

    def _apart(self, subject: Subject, profiler: str) -> Profile:
        return profile_apart(subject, {"_target_": f"{__name__}.{profiler}", "name": self.name, "calls": self.calls})

    def _with_lines(self, subject: Subject, profile: Profile) -> Profile:
        """Return the profile with the sampling process's files, or with the reason why there are none."""
        try:
            lines = self._apart(subject, "ProtonLines")
            reason, files = lines.reason, lines.files
        except ProcessLost as error:
            reason, files = str(error), ()
        reason = f"no figures by line: {reason}" if reason else None
        return replace(
            profile,
            reason="; ".join(filter(None, [profile.reason, reason])) or None,
            files=tuple(dict.fromkeys((*profile.files, *files))),
        )


class ProtonPasses:
    """Profiles `calls` calls of each pass, in a process of its own."""

    def __init__(self, name: str, calls: int) -> None:
        self.name, self.calls = name, calls

    def profile(self, subject: Subject) -> Profile:
        """Write the tree and the table of kernels."""
        proton = PACKAGE.load()
        session = _begin(proton, subject.folder / TREE)
        try:
            _run_passes(proton, subject, self.calls)
        finally:
            proton.finalize(session)
        root = read_tree(subject.folder / TREE)
        kernels: list[ProfiledKernel] = []
        metrics: dict[str, float] = {}
        reasons: list[str] = []
        for direction in subject.calls:
            own = kernels_of(root, direction, self.calls)
            if not own:
                reasons.append(f"proton saw no kernel of {direction}")
                continue
            kernels += own
            metrics[f"{direction}/kernel_time_us"] = sum(kernel.time_us or 0.0 for kernel in own)
            metrics |= {f"{direction}/{name}": value for name, value in rates(root, direction).items()}
        write_whole(subject.folder / _TABLE, kernels_csv(kernels).encode())
        return Profile(
            status="ok" if kernels else "failed",
            reason="; ".join(reasons) or None,
            kernels=tuple(kernels),
            metrics=metrics,
            files=subject.kept(TREE, _TABLE),
        )


class ProtonLines:
    """Samples `calls` calls of each pass, in a process of its own that has loaded no kernel yet.

    Proton reads the lines of a kernel when the driver loads it, and only while it samples. It knows only the names of
    kernels that were loaded before (`CUPTI_CBID_RESOURCE_MODULE_LOADED` in its CuptiProfiler.cpp).
    """

    def __init__(self, name: str, calls: int = 10) -> None:
        self.name, self.calls = name, calls
        self._proton: Any = None
        self._session: Any = None

    def begin(self, folder: Path) -> None:
        """Start sampling."""
        self._proton = PACKAGE.load()
        # Proton samples only kernels of the thread that started the session; autograd launches from threads of its own.
        torch.autograd.set_multithreading_enabled(False)
        self._session = _begin(self._proton, folder / _SAMPLES, mode="pcsampling")

    def profile(self, subject: Subject) -> Profile:
        """Write the tree as `lines.hatchet`, and `lines.csv`."""
        try:
            _run_passes(self._proton, subject, self.calls)
        finally:
            self._proton.finalize(self._session)
        root = read_tree(subject.folder / _SAMPLES)
        lines = [line for direction in subject.calls for line in lines_of(root, direction)]
        placed = [replace(line, place=_as_imported(line.place)) for line in lines]
        if not placed:
            return Profile(
                status="failed", reason="PC sampling took no samples of the passes", files=subject.kept(_SAMPLES)
            )
        table = csv_text([field.name for field in fields(Line)], map(astuple, placed))
        write_whole(subject.folder / _SAMPLED, table.encode())
        known = any(line.place for line in placed)
        return Profile(
            status="ok",
            reason=None if known else "PC sampling knew no line of source: lines.csv has samples by kernel",
            files=subject.kept(_SAMPLES, _SAMPLED),
        )


def _as_imported(place: str) -> str:
    """Return a place in a source file without its import folder: `triton/language/core.py:7@kernel`."""
    for folder in sorted(filter(None, sys.path), key=len, reverse=True):
        if place.startswith(f"{folder.rstrip('/')}/"):
            return place[len(folder.rstrip("/")) + 1 :]
    return place


def _begin(proton: Any, path: Path, **options: Any) -> Any:
    """Start a session and return its number; finalizing it writes `path`, which ends in `.hatchet`."""
    return proton.start(str(path.with_suffix("")), context="shadow", data="tree", backend="cupti", **options)


def _run_passes(proton: Any, subject: Subject, calls: int) -> None:
    """Call each pass `calls` times with cold caches, in a scope with its name, FLOPs and bytes."""
    with subject.scope():
        for direction, call in subject.calls.items():
            work = work_of(subject.record, direction)
            sizes = {"flops": work.flops, "bytes": work.least_bytes} if work else None
            for _ in range(calls):
                subject.evict_caches()
                with proton.scope(direction, sizes):
                    call()
            synchronize(subject.device)
