"""Backends that change the process that measures them: its clocks, its functions, its settings."""

import importlib
import time
from dataclasses import replace
from typing import Any

import torch

from cheats.corpus import FORWARD, cheat
from cheats.ways import Plain, Run, patch

# Either the change is found, or what it was to hide.
FOUND = ("implausible", "inaccurate", "error")
CHANGED = r"(?i)patch|replac|clock|changed"
WRONG = CHANGED + r"|\b(out|dq|dk|dv)\b"


class _Scaled(Plain):
    """Patches a clock so that time passes at a hundredth of its speed."""

    clock = ""

    def prepared(self, case: Any, inputs: Any) -> Any:
        real = getattr(time, self.clock)
        start = real()
        kind = type(start)
        patch(time, self.clock, lambda: kind(start + (real() - start) / 100))
        return inputs


CLOCK = {"passes": FORWARD, "seen": ("reference-kernels#162", "wafer")}


@cheat("clock", "implausible", CHANGED, **CLOCK)
class PatchesPerfCounterNs(_Scaled):
    """Replaces time.perf_counter_ns by a slower clock."""

    clock = "perf_counter_ns"


@cheat("clock", "implausible", CHANGED, **CLOCK)
class PatchesPerfCounter(_Scaled):
    """Replaces time.perf_counter by a slower clock."""

    clock = "perf_counter"


@cheat("clock", "implausible", CHANGED, **CLOCK)
class PatchesMonotonic(_Scaled):
    """Replaces time.monotonic by a slower clock."""

    clock = "monotonic"


@cheat("clock", "implausible", CHANGED, **CLOCK)
class PatchesTimeLater(Plain):
    """Replaces time.perf_counter_ns during its third call, long after it was prepared."""

    calls = 0

    def forward(self, run: Run) -> Any:
        self.calls += 1
        if self.calls == 3:
            real = time.perf_counter_ns
            start = real()
            patch(time, "perf_counter_ns", lambda: start + (real() - start) // 100)
        return run()


class _PatchesOurs(Plain):
    """Replaces a function of attn_exp."""

    where, what = "", ""

    def instead(self, real: Any) -> Any:
        raise NotImplementedError

    def owner(self) -> Any:
        return importlib.import_module(f"attn_exp.{self.where}")

    def prepared(self, case: Any, inputs: Any) -> Any:
        owner = self.owner()
        patch(owner, self.what, self.instead(getattr(owner, self.what)))
        return inputs


@cheat("clock", "implausible", CHANGED, **CLOCK)
class PatchesTheTimersClock(_PatchesOurs):
    """Replaces the clock in the module of the timer."""

    where, what = "timers.cpu", "perf_counter_ns"

    def instead(self, real: Any) -> Any:
        start = real()
        return lambda: start + (real() - start) // 100


@cheat("clock", "implausible", CHANGED, **CLOCK)
class PatchesTheTimersBlock(_PatchesOurs):
    """Replaces the timer's method that times a block."""

    where, what = "timers.cpu", "block"

    def owner(self) -> Any:
        return importlib.import_module("attn_exp.timers.cpu").CpuTimer

    def instead(self, real: Any) -> Any:
        def block(timer: Any, call: Any, calls: int) -> Any:
            made = real(timer, call, calls)
            return replace(made, times_us=[one / 100 for one in made.times_us])

        return block


@cheat("clock", "implausible", CHANGED, **CLOCK)
class PatchesTheStatistics(_PatchesOurs):
    """Replaces the function that makes metrics of samples."""

    where, what = "worker.measure", "pass_metrics"

    def instead(self, real: Any) -> Any:
        def metrics(*args: Any, **kwargs: Any) -> Any:
            return {name: value / 100 for name, value in real(*args, **kwargs).items()}

        return metrics


class _WrongBehindAPatch(_PatchesOurs):
    """Doubles its output, and relies on its patch."""

    def forward(self, run: Run) -> Any:
        return run() * 2


@cheat("clock", FOUND, WRONG, passes=FORWARD)
class PatchesTheVerdict(_WrongBehindAPatch):
    """Replaces the function that decides whether errors are within the tolerance."""

    where, what = "attention.error", "inaccuracy"

    def instead(self, real: Any) -> Any:
        return lambda errors: None


@cheat("clock", FOUND, WRONG, passes=FORWARD)
class PatchesTheVerdictWhereItIsUsed(_WrongBehindAPatch):
    """Replaces the verdict in every module of attn_exp that has imported it."""

    where, what = "attention.error", "inaccuracy"

    def prepared(self, case: Any, inputs: Any) -> Any:
        import sys

        real = importlib.import_module("attn_exp.attention.error").inaccuracy
        for name, module in list(sys.modules.items()):
            if name.startswith("attn_exp") and getattr(module, "inaccuracy", None) is real:
                patch(module, "inaccuracy", lambda errors: None)
        return inputs


@cheat("clock", FOUND, WRONG, passes=FORWARD)
class PatchesTheTolerance(_WrongBehindAPatch):
    """Replaces the comparison with the reference by one that allows everything."""

    where, what = "attention.expected", "judge"

    def owner(self) -> Any:
        return importlib.import_module("attn_exp.attention.expected").Expected

    def instead(self, real: Any) -> Any:
        def judge(*args: Any, **kwargs: Any) -> Any:
            return replace(real(*args, **kwargs), relative=0.0, worst_row=0.0)

        return judge


@cheat("clock", FOUND, WRONG, passes=FORWARD)
class PatchesTheError(_WrongBehindAPatch):
    """Replaces the function that measures errors in the module that uses it."""

    where, what = "attention.tolerance", "tensor_error"

    def instead(self, real: Any) -> Any:
        return lambda tensor, reference, *rest, **more: real(reference, reference)


@cheat("clock", FOUND, WRONG, passes=FORWARD, seen="wafer")
class PatchesNorm(_WrongBehindAPatch):
    """Replaces torch.Tensor.norm by one that is nearly zero."""

    what = "norm"

    def owner(self) -> Any:
        return torch.Tensor

    def instead(self, real: Any) -> Any:
        return lambda tensor, *args, **kwargs: real(tensor, *args, **kwargs) * 0 + 1e-9
