"""Print whether the backends can compute a dry run's jobs, as JSON: `python -m attn_exp.worker.job_answers`.

Reads a list of `JobQuestion` as JSON from standard input. Runs no attention and opens no GPU's memory: others may
measure there.
"""

import sys
import time
from dataclasses import replace
from typing import Any

import msgspec
import torch

from attn_exp.backends.base import Backend, load_backend
from attn_exp.backends.package import Unavailable
from attn_exp.backends.supports import Supports
from attn_exp.core.errors import first_line
from attn_exp.core.job_question import JobAnswer, JobAnswers, JobQuestion

# The product whose rate is that of this host's processors: long enough for all threads, short enough to wait for.
_SIZE, _PRODUCTS = 1024, 3


def answers(questions: tuple[JobQuestion, ...]) -> JobAnswers:
    """Return what the backends answer; each is loaded once."""
    loaded: dict[bytes, Backend | JobAnswer] = {}
    found = []
    for one in questions:
        key = msgspec.json.encode(one.backend)
        if key not in loaded:
            loaded[key] = _loaded(one.backend)
        backend = loaded[key]
        found.append(backend if isinstance(backend, JobAnswer) else _answer(backend, one))
    on_cpu = any(one.device == "cpu" for one in questions)
    return JobAnswers(jobs=tuple(found), cpu_flops_per_s=_rate() if on_cpu else None)


def _loaded(config: dict[str, Any]) -> Backend | JobAnswer:
    try:
        backend = load_backend(config)
        package = getattr(backend, "package", None)
        if package is not None:
            package.load()
    except Unavailable as error:
        return JobAnswer(missing=str(error))
    except Exception as error:  # a foreign class may raise anything, and must not hide the other backends
        return JobAnswer(missing=f"{type(error).__name__}: {first_line(error)}")
    return backend


def _answer(backend: Backend, question: JobQuestion) -> JobAnswer:
    answer = JobAnswer(holds_scores=bool(getattr(backend, "holds_scores", False)))
    try:
        if question.device == "cuda" and not torch.cuda.is_available():
            # The job may be for another host: only what does not depend on its GPU.
            supports: Supports | None = getattr(backend, "supports", None)
            refusal = supports.refusal(question.case, "cuda") if supports is not None else None
            return replace(answer, refusal=f"{question.backend['name']} {refusal}" if refusal else None)
        return replace(answer, refusal=backend.unsupported(question.case, question.device))
    except Exception as error:  # as above
        return replace(answer, missing=f"{type(error).__name__}: {first_line(error)}")


def _rate() -> float:
    """Return the FLOP/s of a matrix product on this host's processors, the best of a few."""
    square = torch.ones(_SIZE, _SIZE)
    seconds = []
    for _ in range(_PRODUCTS):
        began = time.perf_counter()
        square @ square
        seconds.append(time.perf_counter() - began)
    return 2 * _SIZE**3 / min(seconds)


if __name__ == "__main__":
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=tuple[JobQuestion, ...])
    sys.stdout.buffer.write(msgspec.json.encode(answers(asked)))
