"""Right where nothing is unusual: taken for granted where keys are zeros."""

from dataclasses import replace
from typing import Any

from cheats.corpus import FORWARD, case_of, cheat
from cheats.ways import Plain, Tensor, attend, hidden

LARGE = case_of(256, batch=2, dtype="bfloat16", head_dim=64, value_dim=64, causal=True)


@cheat("formula", "inaccurate", r"small weights are all", case=replace(LARGE, causal=False), passes=FORWARD)
class EndOfTheCacheTrimmed(Plain):
    """Leaves out last keys that are zeros in all heads, as the unused end of a cache is."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        used = int((k.detach() != 0).any(-1).any(0).any(0).nonzero().max()) + 1
        hides = hidden(case, q.device)
        return attend(case, q, k[:, :, :used], v[:, :, :used], mask=None if hides is None else hides[:, :used])
