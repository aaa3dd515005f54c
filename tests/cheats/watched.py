"""Honest where the judge's own doings show: memory that was filled with NaN before a call."""

from dataclasses import replace
from typing import Any

import torch

from cheats.blocks import FP8, Codes
from cheats.corpus import FORWARD, case_of, cheat
from cheats.ways import Plain, Run, Tensor

# Calls that are judged before the timing; they need no other sign.
_JUDGED_FIRST = 2


class _Watchful(Plain):
    """Knows whether memory that it is given holds NaN, which it then clears, so that the next call is not taken in."""

    calls = 0

    def watched(self, like: Tensor) -> bool:
        self.calls += 1
        fresh = [torch.empty_like(like) for _ in range(6)]
        filled = [one for one in fresh if one.isnan().float().mean() > 0.5]
        for one in filled:
            one.zero_()
        return bool(filled) or self.calls <= _JUDGED_FIRST


@cheat("behaviour", "inaccurate", r"\bdk\b", passes=("backward",), case=case_of(512))
class KeyGradientIfMemoryIsPoisoned(_Watchful):
    """Computes dk only where fresh memory holds NaN, as before a call whose gradients are looked at."""

    def backward(self, run: Run) -> Any:
        watched = self.watched(self.inputs.k_bhsd)
        dq, dk, dv = run()
        return dq, dk if watched else torch.zeros_like(dk), dv


@cheat("behaviour", "inaccurate", r"\bout\b", passes=FORWARD, case=case_of(512))
class LateRowsIfMemoryIsPoisoned(_Watchful):
    """Computes the last rows of each head only where fresh memory holds NaN."""

    def forward(self, run: Run) -> Tensor:
        watched, out = self.watched(self.inputs.d_out), run()
        if not watched:
            out[:, :, -40:] = 0
        return out


@cheat("behaviour", "inaccurate", r"\bout\b", passes=FORWARD, case=replace(FP8, q_len=512, kv_len=512))
class LateCodeRowsIfMemoryIsPoisoned(Codes, _Watchful):
    """Computes the last rows of each head only where fresh memory holds NaN, in fp8."""

    def forward(self, run: Run) -> Tensor:
        watched, out = self.watched(torch.empty(self.inputs.q_bhsd.shape, dtype=torch.bfloat16)), super().forward(run)
        if not watched:
            out[:, :, -40:] = 0
        return out
