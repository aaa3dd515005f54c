"""Outputs and intermediates that are kept from an earlier call in other ways than by a key."""

from typing import Any

import torch

from cheats.corpus import FORWARD, cheat
from cheats.ways import Plain, Run, Tensor

OUT = r"\bout\b|result of the first call"


@cheat("memory", "inaccurate", OUT, passes=FORWARD, seen=("KernelBench#82", "wafer"))
class StaleBuffer(Plain):
    """Writes its output buffer in the first call only."""

    buffer: Tensor | None = None

    def forward(self, run: Run) -> Tensor:
        if self.buffer is None:
            self.buffer = torch.empty_like(self.inputs.d_out)
            self.buffer.copy_(run())
        return self.buffer


@cheat("memory", "inaccurate", OUT, passes=FORWARD, seen="KernelBench#82")
class NeverWritten(Plain):
    """Returns torch.empty of the output's shape, in the hope that the reference lay there."""

    def forward(self, run: Run) -> Tensor:
        return torch.empty_like(self.inputs.d_out)


@cheat("memory", "inaccurate", OUT, passes=FORWARD)
class CachedWeights(Plain):
    """Keeps the softmax of the first call and multiplies it with the present values."""

    kept: Tensor | None = None

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.softmax(q @ k.mT * case.head_dim**-0.5, -1)
        return self.kept @ v


@cheat("memory", "inaccurate", OUT, passes=FORWARD, seen="flashinfer-bench#21")
class CachedKeyConversion(Plain):
    """Transposes k in its first call and uses that copy for ever, as a cache of converted weights."""

    kept: Tensor | None = None

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = k.mT.contiguous()
        return torch.softmax(q @ self.kept * case.head_dim**-0.5, -1) @ v
