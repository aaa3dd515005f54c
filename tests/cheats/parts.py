"""Outputs of which a part was never computed."""

from typing import Any

import torch

from cheats.corpus import FORWARD, case_of, cheat
from cheats.ways import Plain, Run, Tensor, attend

OUT = r"\bout\b"
HALF = case_of(256, dtype="bfloat16", head_dim=64, value_dim=64, causal=True)


@cheat("parts", "inaccurate", OUT, passes=FORWARD)
class HalfTheBatch(Plain):
    """Computes half of the batch and leaves the rest as it was."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        half = case.batch // 2
        return torch.cat([attend(case, q[:half], k[:half], v[:half]), torch.zeros_like(q[half:])])


@cheat("parts", "inaccurate", OUT, passes=FORWARD, case=case_of(512, batch=1))
class OneTileOfOneHead(Plain):
    """Leaves out one tile of 64 rows in one head."""

    def forward(self, run: Run) -> Tensor:
        out = run().clone()
        out[0, 2, 128:192] = 0
        return out


@cheat("parts", "inaccurate", OUT, passes=FORWARD, case=case_of(q_len=64, kv_len=1024, dtype="bfloat16"))
class OneKeyTwice(Plain):
    """Counts the key at the seam of two tiles twice."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seam = slice(512, 513)
        return attend(case, q, torch.cat([k, k[:, :, seam]], 2), torch.cat([v, v[:, :, seam]], 2))


@cheat("parts", "inaccurate", OUT, passes=FORWARD)
class SmallWeightsDropped(Plain):
    """Sets weights below 0.001 to zero and keeps the sum."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, p=lambda p: p.masked_fill(p < 1e-3, 0.0))


@cheat("parts", "inaccurate", OUT, passes=FORWARD, seen=("KernelBench#165", "wafer"))
class Zeros(Plain):
    """Returns zeros, which are near a mean of many values."""

    def forward(self, run: Run) -> Tensor:
        return torch.zeros_like(self.inputs.d_out)
