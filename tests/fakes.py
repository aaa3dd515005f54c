"""Fakes that tests share: a GPU with a deterministic clock, and backends that do wrong on purpose."""

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from attn_exp.attention.formula import formula, hidden_keys
from attn_exp.attention.inputs import Inputs, autograd_backward
from attn_exp.attention.reference import reference
from attn_exp.backends.base import CLAIMED_SHARE, Calls, calls_of
from attn_exp.backends.eager import Eager
from attn_exp.backends.package import Unavailable
from attn_exp.core.case.case import Case
from attn_exp.core.record.checked import TensorError
from attn_exp.core.record.record import Kernel, PassRecord, Record, Timing
from attn_exp.core.record.request import Measuring, Request
from attn_exp.timers.gpu import MARK, Span
from attn_exp.timers.trace import Activity

CASE = Case(
    batch=1, q_heads=2, kv_heads=2, q_len=16, kv_len=16, head_dim=8, value_dim=8, dtype="float32", causal=True
)  # fmt: skip
MEASURING = Measuring(
    timer="cpu",
    also=(),
    precision=0.005,
    min_rounds=2,
    max_rounds=2,
    budget_s=0.01,
    regime="burst",
    passes=("forward", "backward"),
    seed=123,
)


MARK_US, MAIN_STREAM = 1.0, 7


def make_request(backend: str | dict[str, Any] = "fakes.Honest", case: Case = CASE, **measuring: Any) -> Request:
    """A request for a tiny job on the CPU; `backend` is a class or a whole configuration."""
    config = {"_target_": backend, "name": "fake"} if isinstance(backend, str) else backend
    changed = replace(MEASURING, **measuring)
    return Request(job="fake-0", sweep="s", model="tiny", device="cpu", case=case, backend=config, measuring=changed)


def make_timing(times_us=(10.0, 11.0, 12.0), rounds=None, timer="device", l2="cold", **more: Any) -> Timing:
    """A timing with a round a sample unless told otherwise."""
    rounds = tuple(range(len(times_us))) if rounds is None else tuple(rounds)
    return Timing(timer=timer, l2=l2, times_us=tuple(times_us), rounds=rounds, stop_reason="precise", **more)


def make_record(**changes: Any) -> Record:
    """A record with something in every field."""
    measured = PassRecord(
        first_call_s=0.25,
        peak_memory_bytes=4096,
        errors={"out": TensorError(relative=1e-3, worst_row=2e-3, max_abs=None, tolerance=0.01)},
        kernels=(Kernel(name="flash_fwd", count=1.0, time_us=9.5),),
        timings=(make_timing(flags=("unblocked",), notes={"calls_per_round": 3.0}),),
    )
    filled = {
        "request": make_request(),
        "status": "ok",
        "passes": {"forward": measured},
        "metrics": {"forward/time_us": 11.0, "backward/time_us": 25.0},
        "flags": ("drift", "unstable"),
        "environment": {"gpu": "NVIDIA H200", "versions": {"torch": "2.11"}},
        "ceilings": {"copy_bytes_per_s": 4e12},
        "telemetry": ({"sm_mhz": 1980, "reasons": ["sw_power_cap"]},),
        "stages_s": {"inputs": 0.5},
        "started_at": 1.5,
        "finished_at": 2.5,
    }
    return Record(**filled | changes)


@dataclass
class FakeGpu:
    """A GPU as the timers see it, with exact times: a host clock, and a queue that works in order behind it.

    Every enqueue costs the host `enqueue_us`; a flush takes the GPU `flush_us`. `call(gpu_us)` makes a call of so
    much GPU time. `log` lists what was put into the queue.
    """

    enqueue_us: float = 1.0
    flush_us: float = 20.0
    host_us: float = 0.0
    queue_free_us: float = 0.0
    log: list[tuple[str, float]] = field(default_factory=list)
    # The mean clock in MHz between two moments of the queue.
    clock_mhz: Callable[[float, float], float] | None = None

    def now_us(self) -> float:
        return self.host_us

    def event(self) -> float:
        self._put("event", 0.0)
        return self.queue_free_us

    def wait(self, event: float) -> None:
        self.host_us = max(self.host_us, event)

    def passed(self, event: float) -> bool:
        return event <= self.host_us

    def elapsed_us(self, first: float, second: float) -> float:
        assert second <= self.host_us, "an event is read before the queue has passed it"
        return second - first

    def sleep_us(self, duration_us: float) -> None:
        self._put("sleep", duration_us)

    def mark(self) -> None:
        self._put("mark", MARK_US)

    def flush(self, l2: str) -> None:
        self._put("flush" if l2 == "cold" else "write", self.flush_us)

    def synchronize(self) -> None:
        self.host_us = max(self.host_us, self.queue_free_us)

    def call(self, gpu_us: float, *, host_us: float = 0.0, synchronizes: bool = False) -> Callable[[], None]:
        """A call of one kernel of `gpu_us`, for which the host also computes `host_us` before it enqueues."""

        def run() -> None:
            self.host_us += host_us
            self._put("call", gpu_us)
            if synchronizes:
                self.synchronize()

        return run

    def stamp(self) -> float:
        self._put("stamp", 0.0)
        return self.queue_free_us

    def span(self, first: float, second: float) -> Span | None:
        """As the GPU's: its mean clock from `clock_mhz`, which is none here."""
        if self.clock_mhz is None:
            return None
        return Span(self.clock_mhz(first, second), first / 1e6, second / 1e6)

    def slept_us(self) -> list[float]:
        """The lengths of the blockers so far."""
        return [duration for kind, duration in self.log if kind == "sleep"]

    def _put(self, kind: str, gpu_us: float) -> None:
        self.host_us += self.enqueue_us
        self.queue_free_us = max(self.queue_free_us, self.host_us) + gpu_us
        self.log.append((kind, gpu_us))


# A kernel of a fake trace: its name and microseconds, and of side streams the stream's number and the time from the
# call's start to its own.
FakeKernel = tuple[str, float] | tuple[str, float, int, float]


def fake_activities(
    gpu: FakeGpu, *calls: tuple[FakeKernel, ...], joined: bool = False, lost: Collection[int] = ()
) -> Callable[[Callable[[], None]], list[Activity]]:
    """A stand-in for `attn_exp.timers.trace.activities`, on a device with a time of its own.

    The calls on the fake GPU run the kernels of `calls`, one after the other and from the first again. `joined` says
    whether the stream waits for those on other streams. The records with the numbers `lost` are lost.
    """

    def activities(run: Callable[[], None]) -> list[Activity]:
        begin = len(gpu.log)
        run()
        found, now_us, marks, kernels = list[Activity](), 1000.0, 0, itertools.cycle(calls)

        def ran(name: str, us: float, stream: int, start_us: float) -> float:
            found.append(Activity(name, round(1e3 * start_us), us, stream))
            return start_us + us

        for kind, us in gpu.log[begin:]:
            if kind in ("flush", "write"):
                now_us = ran("memset", 20.0, MAIN_STREAM, now_us)
            elif kind == "sleep":
                now_us = ran(f"at::{MARK}(long)", us, MAIN_STREAM, now_us)
            elif kind == "mark":
                marks += 1
                if marks % 3 == 0:  # behind the wait for the whole device
                    now_us = max(now_us, *(one.end_ns / 1e3 for one in found))
                now_us = ran(f"at::{MARK}(long)", MARK_US, MAIN_STREAM, now_us)
            elif kind == "call" and calls:
                start_us, ends_us = now_us, [now_us]
                for name, kernel_us, *where in next(kernels):
                    if where:
                        ends_us.append(ran(name, kernel_us, int(where[0]), start_us + where[1]))
                    else:
                        now_us = ran(name, kernel_us, MAIN_STREAM, now_us)
                now_us = max(now_us, *ends_us) if joined else now_us
        kept = [one for number, one in enumerate(found) if number not in lost]
        return sorted(kept, key=lambda one: one.start_ns)

    return activities


class Honest(Eager):
    """The formula, right. The wrong ones below change one thing each."""

    def claimed_kernels(self, direction: str, device: str) -> str | None:
        return None


class _Wrong(Honest):
    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        calls = super().prepare(case, inputs)

        def backward(out: torch.Tensor) -> Callable[[], Any]:
            right = calls.backward(out)
            return lambda: self.gradients(*right())

        return replace(calls, forward=lambda: self.output(calls.forward()), backward=backward)

    def output(self, out: torch.Tensor) -> torch.Tensor:
        return out

    def gradients(self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> Any:
        return dq, dk, dv


class OneNan(_Wrong):
    """One element of the output is NaN."""

    def output(self, out: torch.Tensor) -> torch.Tensor:
        spoiled = torch.zeros_like(out)
        spoiled.view(-1)[7] = float("nan")
        return out + spoiled


class OneInfiniteGradient(_Wrong):
    """One element of dk is infinite."""

    def gradients(self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> Any:
        dk[0, 1, 2, 3] = float("inf")
        return dq, dk, dv


class ZeroGradients(_Wrong):
    """The backward returns zeros."""

    def gradients(self, *gradients: torch.Tensor) -> Any:
        return tuple(torch.zeros_like(gradient) for gradient in gradients)


class SwappedGradients(_Wrong):
    """dk and dq change places."""

    def gradients(self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> Any:
        return dk, dq, dv


class TwoGradients(_Wrong):
    """dv is forgotten."""

    def gradients(self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> Any:
        return dq, dk


class WrongLayout(_Wrong):
    """The output is (batch, length, heads, dim)."""

    def output(self, out: torch.Tensor) -> torch.Tensor:
        return out.transpose(1, 2)


class OneRowWrong(_Wrong):
    """The last query of one head sees nothing: a small part of the whole."""

    def output(self, out: torch.Tensor) -> torch.Tensor:
        kept = torch.ones_like(out)
        kept[0, 0, -1] = 0
        return out * kept


class WrongScale(Honest):
    """Scores are divided by d instead of sqrt(d)."""

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        scaled = replace(inputs, q_bhsd=inputs.q_bhsd * case.head_dim**-0.5)
        calls = super().prepare(case, scaled)
        return replace(calls, inputs=None, backward=lambda out: autograd_backward(inputs, out))


class MaskOffByOne(Honest):
    """Every query also sees the key after its own."""

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        def forward() -> torch.Tensor:
            q, k, v = inputs.qkv
            visible = torch.ones(case.q_len, case.kv_len, dtype=torch.bool).tril(1)
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)

        return Calls(forward, lambda out: autograd_backward(inputs, out))


class NoMask(Honest):
    """The causal mask is forgotten."""

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        return super().prepare(replace(case, causal=False), inputs)


class Liar(Honest):
    """Right numbers by other kernels than those it claims."""

    def claimed_kernels(self, direction: str, device: str) -> str | None:
        return r"flash_(fwd|bwd)"


class LiarInBackward(Honest):
    """As the liar, but only in the backward."""

    def claimed_kernels(self, direction: str, device: str) -> str | None:
        return {"forward": "softmax", "backward": "flash_bwd"}[direction]


class Refuses(Honest):
    """Says that it cannot, and would fail if asked all the same."""

    def unsupported(self, case: Case, device: str) -> str | None:
        return f"no kernel for head_dim {case.head_dim} on {device}"

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        raise AssertionError("prepare() must not be called")


class ForwardOnly(Honest):
    """Has no backward."""

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        def backward(out: torch.Tensor) -> Callable[[], Any]:
            raise NotImplementedError("no backward\nhere")

        return Calls(lambda: reference(case, inputs, with_gradients=False)["out"], backward)


_RAISED = {
    "Unavailable": Unavailable("pip install nothing"),
    "ImportError": ModuleNotFoundError("No module named 'nothing'"),
    "MemoryError": MemoryError(),
    "OutOfMemoryError": torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate"),
    "cpu allocator": RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory"),
    "triton": RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 232448. Reducing block"),
    "inductor": RuntimeError(
        "No valid configs. X: out of resource: triton_a_0 Required: 245760 Hardware limit:232448 R"
    ),
    "RuntimeError": RuntimeError("CUDA error: unspecified\nsecond line"),
    "AssertionError": AssertionError(),
}


class Raises(Honest):
    """Raises `what` at `where`: unsupported, prepare, forward, backward, or `later` (a forward after the first)."""

    def __init__(self, name: str, what: str, where: str = "forward") -> None:
        super().__init__(name)
        self.what, self.where, self.calls = what, where, 0

    def _raise_at(self, where: str) -> None:
        if self.where == where:
            raise _RAISED[self.what]

    def unsupported(self, case: Case, device: str) -> str | None:
        self._raise_at("unsupported")
        return None

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        self._raise_at("prepare")
        right = super().prepare(case, inputs)

        def forward() -> torch.Tensor:
            self._raise_at("forward")
            self.calls += 1
            if self.calls > 3:
                self._raise_at("later")
            return right.forward()

        def backward(out: torch.Tensor) -> Callable[[], Any]:
            self._raise_at("backward")
            return right.backward(out)

        return replace(right, forward=forward, backward=backward)


class OnFakeGpu(Honest):
    """Honest tensors, and a kernel of `gpu_us` in the queue of `gpu` for each call."""

    def __init__(
        self,
        name: str,
        gpu: FakeGpu,
        gpu_us: float,
        host_us: float = 0.0,
        claim: str | None = None,
        own: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(name)
        self.call, self.claim = gpu.call(gpu_us, host_us=host_us), claim
        # As a backend that is not an Eager.
        vars(self).update({"claimed_share": CLAIMED_SHARE} | dict(own or {}))

    def claimed_kernels(self, direction: str, device: str) -> str | None:
        return self.claim

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        right = super().prepare(case, inputs)

        def forward() -> torch.Tensor:
            self.call()
            return right.forward()

        def backward(out: torch.Tensor) -> Callable[[], Any]:
            gradients = right.backward(out)

            def run() -> Any:
                self.call()
                return gradients()

            return run

        return replace(right, forward=forward, backward=backward)


class Greedy(_Wrong):
    """Asks for more memory than any address space holds."""

    def output(self, out: torch.Tensor) -> torch.Tensor:
        return out + torch.empty(1 << 50, dtype=torch.int8).sum()


class ManyOperators(Eager):
    """The formula behind a dozen longer operators."""

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        right, noise = super().prepare(case, inputs), torch.rand(1 << 16)
        others = (torch.sin, torch.cos, torch.tan, torch.exp, torch.log, torch.sqrt, torch.tanh, torch.erf,
                  torch.sinh, torch.cosh, torch.asin, torch.acos, torch.atan, torch.log1p, torch.expm1)  # fmt: skip

        def forward() -> torch.Tensor:
            for other in others:
                other(noise)
            return right.forward()

        return replace(right, forward=forward)


class RightAtFirst(Honest):
    """Right in its first `right` calls of a pass; `how` says what later calls do wrong."""

    def __init__(self, name: str, how: str, right: int = 1) -> None:
        super().__init__(name)
        self.how, self.right = how, right

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        honest, calls = super().prepare(case, inputs), {"forward": 0, "backward": 0}

        def forward() -> torch.Tensor:
            calls["forward"] += 1
            out = honest.forward()
            if calls["forward"] <= self.right:
                return out
            if self.how == "spoils its inputs":
                with torch.no_grad():
                    inputs.q_bhsd.mul_(0.5)
            return out * float("nan") if self.how == "not a number" else out

        def backward(out: torch.Tensor) -> Callable[[], Any]:
            right = honest.backward(out)

            def gradients() -> Any:
                calls["backward"] += 1
                found = right()
                none = calls["backward"] > self.right and self.how == "no gradients"
                return tuple(torch.zeros_like(one) for one in found) if none else found

            return gradients

        return replace(honest, forward=forward, backward=backward)


class EdgeOff(Honest):
    """Hides the last (or first) `lost` keys that a query sees, or shows the one after them (`shown`)."""

    def __init__(self, name: str, lost: int = 0, end: str = "last", shown: bool = False) -> None:
        super().__init__(name)
        self.lost, self.end, self.shown = lost, end, shown

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        hidden = hidden_keys(case, 0, case.q_len, inputs.q_bhsd.device)
        for row in hidden:
            seen = (~row).nonzero()[:, 0]
            if len(seen) <= self.lost:
                continue
            row[seen[-self.lost :] if self.end == "last" else seen[: self.lost]] = self.lost > 0
            if self.shown and seen[-1] + 1 < len(row):
                row[seen[-1] + 1] = False
        return calls_of(partial(formula, case, hidden), inputs)


class TiresOut(Honest):
    """Right, until it is called for the eighth time."""

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        honest, left = super().prepare(case, inputs), iter(range(8))

        def forward() -> torch.Tensor:
            if next(left, None) is None:
                raise RuntimeError("no more")
            return honest.forward()

        return replace(honest, forward=forward)
