"""Print what each backend can compute, as JSON: `python -m attn_exp.worker.capabilities`, for `attn-exp backends`.

Reads a `Question` as JSON from standard input. Runs no attention.
"""

import os
import sys
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from attn_exp.backends.base import Backend, load_backend
from attn_exp.backends.package import Package, Unavailable
from attn_exp.backends.supports import Supports
from attn_exp.core.case.case import Case
from attn_exp.core.errors import first_line


@dataclass(frozen=True, kw_only=True)
class Question:
    """The backends' configurations, the device, and optionally the case that they are asked about."""

    backends: list[dict[str, Any]]
    device: str
    case: Case | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Known facts about one backend.

    `missing` is why it cannot be loaded, `refusal` why it cannot compute the question's case here, and `declared` why
    it cannot on any machine, by what it declares.
    """

    name: str
    about: str = ""
    needs: str = ""
    version: str | None = None
    missing: str | None = None
    can_compute: str = ""
    refusal: str | None = None
    declared: str | None = None


def answer(config: dict[str, Any], question: Question) -> Answer:
    """Return what one backend answers."""
    name = str(config["name"])
    try:
        return _asked(name, load_backend(config), question)
    except Unavailable as error:
        return Answer(name=name, missing=str(error))
    except Exception as error:  # a foreign class may raise anything, and must not hide the other backends
        return Answer(name=name, missing=f"{type(error).__name__}: {first_line(error)}")


def _asked(name: str, backend: Backend, question: Question) -> Answer:
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
        refusal=_refusal(backend, question),
        declared=supports.refusal(question.case, supports.devices[0]) if supports and question.case else None,
    )


def _refusal(backend: Backend, question: Question) -> str | None:
    if question.case is None:
        return None
    if question.device == "cuda" and not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no CUDA device"
    return backend.unsupported(question.case, question.device)


if __name__ == "__main__":
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    answers = [answer(config, question) for config in question.backends]
    sys.stdout.buffer.write(msgspec.json.encode(answers))
    sys.stdout.flush()
    # Without the interpreter's teardown, a fifth of the time.
    os._exit(0)
