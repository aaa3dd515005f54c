"""Proton's sessions: load Triton's profiler, and call each pass in a scope with its work."""

import importlib
from pathlib import Path
from typing import Any

from attn_exp.backends.package import Package, Unavailable
from attn_exp.core.errors import first_line
from attn_exp.core.roofline import work_of
from attn_exp.profilers.base import Subject
from attn_exp.timers.sync import synchronize

_PACKAGE = Package("triton", "triton.profiler", "pip install 'triton>=3.6,<3.8'")


def version() -> str:
    """Return Triton's version for messages."""
    return str(_PACKAGE.version())


def load_proton() -> Any:
    """Import Triton's profiler.

    Raises:
        Unavailable: Triton is not installed, is too old, or was built without it.
    """
    try:
        proton = importlib.import_module(_PACKAGE.module)
    except ModuleNotFoundError as error:
        if error.name == "triton":
            raise Unavailable(f"triton is not installed: {_PACKAGE.install}") from error
        raise Unavailable(f"Triton {version()} has no profiler: {_PACKAGE.install}") from error
    except Exception as error:  # an incompatible library may raise anything when it is imported
        raise Unavailable(f"Triton's profiler cannot be imported here: {first_line(error)}") from error
    lacking = [name for name in ("start", "scope", "finalize") if not hasattr(proton, name)]
    if lacking:
        raise Unavailable(f"Triton {version()} has no proton.{lacking[0]}: {_PACKAGE.install}")
    return proton


def begin(proton: Any, path: Path, **options: Any) -> Any:
    """Start a session and return its number; finalizing it writes `path`, which ends in `.hatchet`."""
    return proton.start(str(path.with_suffix("")), context="shadow", data="tree", backend="cupti", **options)


def run_passes(proton: Any, subject: Subject, calls: int) -> None:
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
