"""Threads of a backend's own: beside the one that it was given, or after a call has returned."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from cheats.corpus import FORWARD, case_of, cheat, honest
from cheats.gradients import slow_weights
from cheats.ways import Plain, Run, Tensor, attend, later

MEDIUM = case_of(256)


class _Pooled(Plain):
    """Has a pool of one thread."""

    def prepared(self, case: Any, inputs: Any) -> Any:
        self.pool = ThreadPoolExecutor(1)
        later(self.pool.shutdown)
        return inputs


@cheat(
    "threads", ("implausible", "inaccurate"), r"after a call of .* has returned|\bout\b", passes=FORWARD, case=MEDIUM
)
class LastHeadLeftToAThread(_Pooled):
    """Leaves the last head to a thread that it does not wait for, after its first two calls."""

    calls = 0

    def forward(self, run: Run) -> Tensor:
        self.calls += 1
        out = run()
        if self.calls <= 2:
            return out
        q, k, v = (one[-1:, -1:] for one in self.inputs.qkv)
        out[-1:, -1:] = 0

        def fill() -> None:
            slow_weights(q, k)
            out[-1:, -1:] = attend(self.case, q, k, v)

        self.pool.submit(fill)
        return out


@cheat("threads", ("implausible", "inaccurate"), r"after a call of .* has returned|\bdv", case=MEDIUM)
class ValueGradientLeftToAThread(_Pooled):
    """Leaves dv of one head to a thread that it does not wait for."""

    def backward(self, run: Run) -> Any:
        dq, dk, dv = run()
        q, k = (one.detach()[-1:, -1:] for one in self.inputs.qkv[:2])
        dv = dv.clone()
        dv[-1:, -1:] = 0

        def fill() -> None:
            weights = slow_weights(q, k).to(q.dtype)
            dv[-1:, -1:] = weights.mT @ self.inputs.d_out[-1:, -1:]

        self.pool.submit(fill)
        return dq, dk, dv


@cheat("threads", "implausible", "after a call of .* has returned", passes=FORWARD, case=MEDIUM)
class TidiesUpAfterwards(_Pooled):
    """Returns the right output, and lets a thread do a part of its work, here of no use, when nobody times it."""

    def forward(self, run: Run) -> Tensor:
        q, k, _ = (one.detach() for one in self.inputs.qkv)
        out = run()
        self.pool.submit(slow_weights, q, k)
        return out


@honest(passes=FORWARD, case=MEDIUM)
class InOneThreadThatIsJoined(_Pooled):
    """Computes everything in a thread of its own, and waits for it."""

    def forward(self, run: Run) -> Tensor:
        out: Tensor = self.pool.submit(run).result()
        return out


@honest(case=MEDIUM)
class ThreadByThread(_Pooled):
    """Hands half of the work to a thread of its own, and waits for it before it does the other half."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (q0, q1), (k0, k1), (v0, v1) = (one.chunk(2, dim=1) for one in (q, k, v))
        half = self.pool.submit(attend, case, q0, k0, v0).result()
        return torch.cat([half, attend(case, q1, k1, v1)], 1)
