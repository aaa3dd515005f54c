"""The bench of all checks: a machine, a call on it, and how calls are timed and compared."""

import contextlib
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from attn_exp.attention.inputs import make_inputs
from attn_exp.backends.base import Calls, load_backend
from attn_exp.core.case.case import Case
from attn_exp.core.record.request import Measuring, Request
from attn_exp.core.stats.paired import MARGIN_FLOOR
from attn_exp.core.stats.summary import medians_by_round
from attn_exp.timers import make_timer
from attn_exp.timers.call import Call
from attn_exp.timers.loop import Entry, sample_turns
from attn_exp.timers.stopping import StoppingRule
from attn_exp.worker.machine.device import Machine

# Always seven rounds, so that every comparison costs the same.
SEVEN = StoppingRule(precision=0.0, min_rounds=7, max_rounds=7, budget_s=0.0)


_FLASH = {"_target_": "attn_exp.backends.sdpa.Flash", "name": "flash"}
MEASURING = Measuring(
    timer="device", also=("kernel", "event"), precision=0.01, min_rounds=5, max_rounds=10, budget_s=0.1,
    regime="sustained", passes=("forward",), seed=7,
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report."""

    name: str
    passed: bool
    seen: str


@dataclass
class Bench:
    """The machine, a call of about a millisecond on it, and results of checks for later runs."""

    machine: Machine
    call: Call
    call_us: float
    margin: float = MARGIN_FLOOR
    comparisons: int = 0
    # What every call is timed in: without it SDPA itself chooses a kernel.
    scope: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    # The same as `call`, with tensors of its own at other addresses; None where only `call` is needed.
    twin: Call | None = None
    # Told which share of the check that runs is done.
    progress: Callable[[float], None] = lambda share: None

    @property
    def timer(self) -> str:
        """Return the default timer of this device."""
        return "device" if self.machine.gpu is not None else "cpu"


def attention(
    device: str, *, batch: int, length: int, heads: int = 16, dim: int = 128, gradients: bool = False
) -> tuple[Case, Calls]:
    """Return the calls of SDPA's flash attention on new inputs."""
    case = Case(
        batch=batch,
        q_heads=heads,
        kv_heads=heads,
        q_len=length,
        kv_len=length,
        head_dim=dim,
        value_dim=dim,
        dtype="bfloat16" if device == "cuda" else "float32",
    )
    inputs = make_inputs(case, device, 7, with_gradients=gradients)
    return case, load_backend(_FLASH).prepare(case, inputs)


def flash_request(device: str, case: Case, measuring: Measuring) -> Request:
    """Return the job of a case on flash."""
    return Request(
        job="check", sweep="doctor", model="check", device=device, case=case, backend=_FLASH, measuring=measuring
    )


def open_bench(device: str) -> Bench:
    """Open a machine, put it under load, and prepare attention of about a millisecond.

    Raises Unavailable without a device.
    """
    machine = Machine.open(device)
    machine.ceilings_for("bfloat16" if device == "cuda" else "float32")
    if device == "cuda":
        calls, twin = (attention(device, batch=8, length=4096)[1] for _ in range(2))
    else:
        calls, twin = (attention(device, batch=1, length=128, heads=2, dim=32)[1] for _ in range(2))
    bench = Bench(machine, calls.forward, 0.0, scope=calls.scope, twin=twin.forward)
    (medians_us,) = side_by_side(bench, bench.call)
    bench.call_us = statistics.median(medians_us.values())
    return bench


def side_by_side(bench: Bench, *calls: Call, rule: StoppingRule = SEVEN, rests: bool = False) -> list[dict[int, float]]:
    """Return the median of each call in each round in microseconds, interleaved, by the default timer.

    With `rests` a GPU rests between blocks for as long as keeps its highest clock, so that no power cap engages.
    """
    entries = [Entry(make_timer(bench.timer, bench.machine.gpu), call, bench.scope) for call in calls]
    timings = sample_turns(entries, rule, card=bench.machine.card if rests else None)
    return [medians_by_round(timing.times_us, timing.rounds) for timing in timings if timing is not None]
