"""What a dry run says of jobs that would run: whether their backends can, how long they take, what memory they need."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from attn_exp.core.bitwise import BUDGET_S, CALLS
from attn_exp.core.case import DTYPE_BYTES
from attn_exp.core.flops import flops
from attn_exp.core.hardware import datasheet_peak
from attn_exp.core.job_question import JobAnswer, JobAnswers, JobQuestion
from attn_exp.core.nvml import GpuInfo
from attn_exp.core.process import installed_bytes
from attn_exp.core.request import Request
from attn_exp.core.text import duration
from attn_exp.run.capabilities import answer_of

# Seconds of a job beside its samples. 60 jobs of results/h200/sdpa_sweep_quick took 28.8 s, of which 6 were samples; on
# a CPU, as measured on two cores, without the reference.
_JOB_S = {"cuda": 0.4, "cpu": 0.6}
# Seconds of load before a pass until a GPU's clock has settled: 60 jobs of results/h200/sdpa_sweep took 69 s.
_SETTLED_S = 0.3
# Passes over all scores that the reference, the judging and the warm-up take beside the samples.
_JUDGING = 6
# A call's rate, relative to a matrix product's. Neither a lower nor an upper bound: backends differ by more.
_SHARE = 0.4
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What is expected of one job.

    Attributes:
        what: `would run`, `unavailable`, `unsupported` or `too large`.
        why: why it would not run; empty otherwise.
        seconds: about how long it takes; None if the device's rate is unknown.
        bytes: the memory that it needs at least; 0 if that is unknown.
    """

    what: str
    why: str
    seconds: float | None
    bytes: int

    def size(self) -> str:
        """Return about how long the job takes and what it needs at least: `about 2 s, 12 MiB or more`."""
        parts = [] if self.seconds is None else [f"about {duration(max(1.0, self.seconds))}"]
        return ", ".join([*parts, *([f"{memory_text(self.bytes)} or more"] if self.bytes else [])])


def forecasts(requests: Sequence[Request], gpus: Sequence[GpuInfo]) -> list[Forecast]:
    """Return what is expected of jobs that would run, asking their backends in a child process.

    Args:
        requests: the jobs.
        gpus: the GPUs that they may run on; the first one stands for all.

    Raises:
        UserError: a backend ends the child process.
    """
    if not requests:
        return []
    asked = [JobQuestion(backend=one.backend, case=one.case, device=one.device) for one in requests]
    answers = msgspec.json.decode(answer_of("attn_exp.worker.job_answers", asked), type=JobAnswers)
    return [
        _forecast(request, answer, gpus[0] if gpus else None, answers.cpu_flops_per_s)
        for request, answer in zip(requests, answers.jobs, strict=True)
    ]


def _forecast(request: Request, answer: JobAnswer, gpu: GpuInfo | None, cpu_flops_per_s: float | None) -> Forecast:
    on_gpu = request.device == "cuda"
    needed = least_bytes(request, holds_scores=answer.holds_scores)
    there = (gpu.memory_bytes if gpu is not None else 0) if on_gpu else installed_bytes()
    what, why = "would run", ""
    if answer.missing or answer.refusal:
        what, why = ("unavailable", answer.missing) if answer.missing else ("unsupported", answer.refusal)  # type: ignore[assignment]
    elif there and needed > there:
        held = " (all scores are held in memory)" if answer.holds_scores else ""
        whose = gpu.name if on_gpu and gpu is not None else "this host"
        what = "too large"
        why = f"it needs {memory_text(needed)} or more{held}, and {whose} has {memory_text(there)}"
    return Forecast(what=what, why=why, seconds=_seconds(request, gpu, cpu_flops_per_s), bytes=needed)


def least_bytes(request: Request, *, holds_scores: bool) -> int:
    """Return the memory that a job's tensors take at least: inputs, output, gradients, bias, and scores that are held.

    A backend that holds all scores has them and the weights, in the case's dtype.
    """
    case, size = request.case, DTYPE_BYTES[request.case.dtype]
    dims = case.head_dim + case.value_dim
    sides = case.batch * dims * (case.q_heads * case.q_len + case.kv_heads * case.kv_len)
    bias = case.bias_heads * case.q_len * case.kv_len
    scores = case.batch * case.q_heads * case.q_len * case.kv_len if holds_scores else 0
    return size * ((2 if request.measuring.with_gradients else 1) * sides + 2 * scores + bias)


def _seconds(request: Request, gpu: GpuInfo | None, cpu_flops_per_s: float | None) -> float | None:
    case, way = request.case, request.measuring
    if request.device == "cpu":
        rate = cpu_flops_per_s
    else:
        peak = datasheet_peak(gpu.name) if gpu is not None else None
        rate = peak.flops_limit(case.dtype) if peak is not None else None
    if rate is None:
        return None
    total = _JOB_S[request.device]
    for side in way.passes:
        call_s = flops(case, side) / (_SHARE * rate)
        settled_s = min(way.settle_s, _SETTLED_S) if request.device == "cuda" and way.regime == "sustained" else 0.0
        total += settled_s + max(way.budget_s, way.min_rounds * call_s) + _JUDGING * call_s
        total += min(BUDGET_S, CALLS * call_s) if way.determinism else 0.0
    return total


def memory_text(count: int) -> str:
    """Format bytes: `12.4 MiB`."""
    name, unit = next((one for one in _UNITS if count >= one[1]), ("B", 1))
    return f"{count / unit:.3g} {name}" if count < 1000 * unit else f"{count / unit:,.0f} {name}"
