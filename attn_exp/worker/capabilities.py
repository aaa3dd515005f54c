"""Print what each backend can compute, as JSON: `python -m attn_exp.worker.capabilities`, for `attn-exp backends`.

Reads a `Question` as JSON from standard input. Runs no attention.
"""

import os
import sys
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from attn_exp.backends.base import Backend, load_backend, supported_passes
from attn_exp.backends.package import Package, Unavailable
from attn_exp.backends.supports import Supports
from attn_exp.core.errors import first_line
from attn_exp.core.record.request import Request


@dataclass(frozen=True, kw_only=True)
class Question:
    """The backends' configurations, and for each the job that it is asked about, if any."""

    backends: list[dict[str, Any]]
    jobs: list[Request | None]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Known facts about one backend.

    `missing` is why it cannot be loaded, `refusal` why it cannot compute its job here, and `declared` why it cannot
    compute the case on any machine, by what it declares.
    """

    name: str
    about: str = ""
    needs: str = ""
    version: str | None = None
    missing: str | None = None
    can_compute: str = ""
    refusal: str | None = None
    declared: str | None = None


def answer(config: dict[str, Any], job: Request | None) -> Answer:
    """Return what one backend answers."""
    name = str(config["name"])
    try:
        return _asked(name, load_backend(config), job)
    except Unavailable as error:
        return Answer(name=name, missing=str(error))
    except Exception as error:  # a foreign class may raise anything, and must not hide the other backends
        return Answer(name=name, missing=f"{type(error).__name__}: {first_line(error)}")


def refusal(backend: Backend, request: Request, device: str) -> str | None:
    """Return why a backend cannot compute on a device what a job asks for, or None if it can."""
    case, measuring = request.case, request.measuring
    if case.in_codes and measuring.accumulate:
        return f"gradients of {case.dtype} are codes with scales, which cannot be added: set accumulate=false"
    if case.in_codes and "step" in measuring.passes:
        return f"a step of {case.dtype} needs the scales of a step before it: set passes=[forward,backward]"
    if reason := backend.unsupported(case, device):
        return reason
    if measuring.with_gradients and "backward" not in supported_passes(backend, case):
        of_dtype = f" of {case.dtype}" * case.quantised
        return case.forward_only or f"{backend.name} has no backward{of_dtype}: set passes=[forward]"
    return None


def _asked(name: str, backend: Backend, job: Request | None) -> Answer:
    package: Package | None = getattr(backend, "package", None)
    supports: Supports | None = getattr(backend, "supports", None)
    missing = None
    if package is not None:
        try:
            package.load()
        except Unavailable as error:
            missing = str(error)
    return Answer(
        name=name,
        about=(type(backend).__doc__ or "").strip().partition("\n")[0],
        needs=package.install if package is not None else "",
        version=package.version() if package is not None else str(torch.__version__),
        missing=missing,
        can_compute=supports.summary() if supports is not None else "",
        refusal=_refusal(backend, job) if job else None,
        declared=supports.refusal(job.case, supports.devices[0]) if supports and job else None,
    )


def _refusal(backend: Backend, job: Request) -> str | None:
    if job.device == "cuda" and not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no CUDA device"
    return refusal(backend, job, job.device)


if __name__ == "__main__":
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    sys.stdout.buffer.write(msgspec.json.encode(list(map(answer, question.backends, question.jobs))))
    sys.stdout.flush()
    # Without the interpreter's teardown, a fifth of the time.
    os._exit(0)
