"""Profiler `proton`: Triton's, with the work and bytes of each pass, and samples by line of Triton kernels."""

import csv
import importlib
import inspect
import re
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

from attn_exp.attempt import sentence
from attn_exp.backends.package import Package, Unavailable
from attn_exp.ceilings import synchronize
from attn_exp.errors import first_line
from attn_exp.profile import Profile, ProfiledKernel
from attn_exp.profilers.apart import profile_apart
from attn_exp.profilers.base import Subject
from attn_exp.profilers.figures_csv import kernels_csv
from attn_exp.profilers.hatchet import HatchetError, Line, kernels_of, lines_of, rates, read_tree
from attn_exp.record import write_whole
from attn_exp.roofline import work_of

_PACKAGE = Package("triton", "triton.profiler", "pip install 'triton>=3.6,<3.8'")
# CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED, as Proton words it.
_HELD = re.compile(r"cupti\w+ with error 39\b")
# Their own kernels are Triton's, and so have lines; others' come without source.
_TRITON = ("triton", "flex", "helion", "compiled")
_TREE, _TABLE, _LINES, _LINES_TABLE = "proton.hatchet", "kernels.csv", "lines.hatchet", "lines.csv"


class Proton:
    """Triton's profiler over `calls` calls of each pass, cold caches before each of them.

    With `lines`, kernels that Triton compiled are sampled by line in a second session. `apart` is the default because a
    process that PyTorch's profiler has traced in holds CUPTI already, and every worker has: it names kernels that way.
    """

    def __init__(self, name: str, calls: int = 10, lines: bool = True, apart: bool = True) -> None:
        self.name, self.calls, self.lines, self.apart = name, calls, lines, apart

    def profile(self, subject: Subject) -> Profile:
        """The tree as `proton.hatchet`, which `proton-viewer` shows, `kernels.csv`, and `lines.csv` where there is one.

        Raises:
            Unavailable: no GPU, or a Triton without its profiler.
        """
        if subject.machine.device != "cuda":
            raise Unavailable("proton sees NVIDIA GPUs alone: use profiler=torch on a CPU")
        proton = load_proton()
        return profile_apart(subject, self.name) if self.apart else self.look(subject, proton)

    def look(self, subject: Subject, proton: Any) -> Profile:
        """The same by a given module `triton.profiler`, in this process.

        Raises:
            Unavailable: another profiler has CUPTI in this process.
        """
        try:
            _session(proton, subject, subject.folder / _TREE, self.calls)
        except RuntimeError as error:
            if _HELD.search(str(error)):
                raise Unavailable(
                    f"another profiler holds CUPTI in this process, which serves one at a time ({first_line(error)}): "
                    f"set profiler.{self.name}.apart=true"
                ) from error
            raise
        root = read_tree(subject.folder / _TREE)
        kernels: list[ProfiledKernel] = []
        metrics: dict[str, float] = {}
        said: list[str] = []
        for direction in subject.calls:
            own = kernels_of(root, direction, self.calls)
            if not own:
                said.append(f"proton saw no kernel of {direction}")
                continue
            kernels += own
            metrics[f"{direction}/kernel_time_us"] = sum(kernel.time_us or 0.0 for kernel in own)
            metrics |= {f"{direction}/{name}": value for name, value in rates(root, direction).items()}
        write_whole(subject.folder / _TABLE, kernels_csv(kernels).encode())
        if kernels and self.lines and of_triton(subject):
            said += filter(None, [self._lines(subject, proton)])
        return Profile(
            status="ok" if kernels else "failed",
            reason="; ".join(said) or None,
            kernels=tuple(kernels),
            metrics=metrics,
            files=subject.kept(_TREE, _TABLE, _LINES, _LINES_TABLE),
        )

    def _lines(self, subject: Subject, proton: Any) -> str | None:
        """Sample the program counter; why there are no lines, or None."""
        if "mode" not in inspect.signature(proton.start).parameters:
            version = _PACKAGE.version()
            return f"no figures by line: Triton {version} has no PC sampling: {_PACKAGE.install}"
        try:
            _session(proton, subject, subject.folder / _LINES, self.calls, mode="pcsampling")
            root = read_tree(subject.folder / _LINES)
            found = [line for direction in subject.calls for line in lines_of(root, direction)]
        except HatchetError as error:
            return f"no figures by line: {error}"
        except Exception as error:  # CUPTI's refusals come as whatever the library raises; the rest is measured
            return f"no figures by line: {sentence(error)}"
        if not found:
            return "no figures by line: PC sampling took no samples"
        _write_lines(found, subject.folder / _LINES_TABLE)
        if not any(line.place for line in found):
            return "PC sampling knew no line of source: lines.csv has samples and stalls by kernel"
        return None


def of_triton(subject: Subject) -> bool:
    """Whether some of a job's kernels are compiled by Triton, as far as names tell."""
    return subject.backend.name in _TRITON or subject.request.compile.mode != "none"


def load_proton() -> Any:
    """Triton's profiler.

    Raises:
        Unavailable: Triton is not installed, is too old, or was built without it.
    """
    try:
        proton = importlib.import_module(_PACKAGE.module)
    except ModuleNotFoundError as error:
        if error.name == "triton":
            raise Unavailable(f"triton is not installed: {_PACKAGE.install}") from error
        raise Unavailable(f"Triton {_PACKAGE.version()} has no profiler: {_PACKAGE.install}") from error
    except Exception as error:  # a library that does not fit what is installed fails in ways of its own
        raise Unavailable(f"Triton's profiler cannot be imported here: {first_line(error)}") from error
    lacking = [name for name in ("start", "scope", "finalize") if not hasattr(proton, name)]
    if lacking:
        raise Unavailable(f"Triton {_PACKAGE.version()} has no proton.{lacking[0]}: {_PACKAGE.install}")
    return proton


def _session(proton: Any, subject: Subject, path: Path, calls: int, **options: Any) -> None:
    """One session over all passes, written to `path`, which ends in `.hatchet`."""
    device = subject.machine.device
    session = proton.start(str(path.with_suffix("")), context="shadow", data="tree", backend="cupti", **options)
    try:
        with subject.scope():
            for direction, call in subject.calls.items():
                work = work_of(subject.record, direction)
                sizes = {"flops": work.flops, "bytes": work.least_bytes} if work else None
                for _ in range(calls):
                    if subject.machine.gpu is not None:
                        subject.machine.gpu.flush()
                    synchronize(device)
                    with proton.scope(direction, sizes):
                        call()
                synchronize(device)
    finally:
        proton.finalize(session)


def _write_lines(lines: list[Line], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([field.name for field in fields(Line)])
        writer.writerows(astuple(line) for line in lines)
