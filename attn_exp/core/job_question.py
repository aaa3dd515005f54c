"""What a dry run asks the worker's side about its jobs, and what comes back, both as JSON."""

from dataclasses import dataclass
from typing import Any

from attn_exp.core.case import Case


@dataclass(frozen=True, kw_only=True)
class JobQuestion:
    """A job that would run: a backend's configuration, the case, and `cpu` or `cuda`."""

    backend: dict[str, Any]
    case: Case
    device: str


@dataclass(frozen=True, kw_only=True)
class JobAnswer:
    """What a backend says about a job.

    Attributes:
        missing: why the backend cannot be loaded.
        refusal: why it cannot compute the case.
        holds_scores: whether it holds all scores in memory.
    """

    missing: str | None = None
    refusal: str | None = None
    holds_scores: bool = False


@dataclass(frozen=True, kw_only=True)
class JobAnswers:
    """An answer to each question, and the rate of a float32 matrix product on this host's processors (FLOP/s).

    The rate is None if no question is about the CPU.
    """

    jobs: tuple[JobAnswer, ...]
    cpu_flops_per_s: float | None = None
