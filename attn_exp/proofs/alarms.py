"""Proof 10: alarms fire."""

import math
from dataclasses import replace

import torch

from attn_exp.backends.base import Calls
from attn_exp.backends.sdpa import Flash, Math
from attn_exp.case import Case
from attn_exp.flags import telemetry_flags
from attn_exp.inputs import Inputs
from attn_exp.measure import measure
from attn_exp.proofs.bench import Bench, Finding, attention
from attn_exp.record import Measuring, Request
from attn_exp.timers.kernel import Activity, split_calls

MEASURING = Measuring(
    timer="device",
    also=("kernel", "event"),
    precision=0.01,
    min_rounds=5,
    max_rounds=10,
    budget_s=0.1,
    regime="sustained",
    passes=("forward",),
    seed=7,
)


def alarms_fire(bench: Bench) -> Finding:
    """10: throttling, company on the GPU, a wrong backend behind a label, a NaN, a lost profiler record."""
    throttled = [{"held_back_ns": {"power": 0, "thermal": 0}}, {"held_back_ns": {"power": 5, "thermal": 5}}]
    shared = [{"processes": 2, "sm_clock_mhz": 300}]
    alarms = {
        "throttle": telemetry_flags(throttled, None) == {"power_capped", "thermal"},
        "shared GPU, low clock": telemetry_flags(shared, 1980) == {"shared_gpu", "clock_low"},
        "lost record": split_calls([Activity(name, 0, 1.0) for name in ("flush", "a", "flush")], 2).lossy,
        "wrong kernel": _status(bench, f"{__name__}:Mislabelled") == "wrong_kernel",
        "NaN": _status(bench, f"{__name__}:Spoiled") == "inaccurate",
    }
    silent = [name for name, fired in alarms.items() if not fired]
    return Finding(
        "alarms fire", not silent, "silent: " + ", ".join(silent) if silent else f"all {len(alarms)} of them"
    )


class Mislabelled(Flash):
    """Says flash and runs the formula."""

    choice = Math.choice


class Spoiled(Flash):
    """One element of its output is NaN."""

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """As flash, and then it spoils the result."""
        calls = super().prepare(case, inputs)

        def forward() -> torch.Tensor:
            out = calls.forward().clone()
            out[0, 0, 0, 0] = math.nan
            return out

        return replace(calls, forward=forward)


def _status(bench: Bench, target: str) -> str:
    device = bench.machine.device
    case, _ = attention(device, batch=1, length=128, heads=2, dim=64)
    timer, also = ("device", ("kernel",)) if device == "cuda" else ("cpu", ())
    measuring = replace(MEASURING, timer=timer, also=also)
    request = Request(
        job="proof", sweep="doctor", model="proof", device=device, case=case,
        backend={"_target_": target, "name": "flash"}, measuring=measuring,
    )  # fmt: skip
    return measure(request, bench.machine).status
