"""Another formula than the case's, near enough on N(0, 1) to pass for rounding."""

from typing import Any

from cheats.corpus import FORWARD, case_of, cheat
from cheats.ways import Plain, Tensor, attend

OUT = r"\bout\b"
ANY = r"\b(out|dq|dk|dv)\b"
HALF = case_of(256, dtype="bfloat16", head_dim=64, value_dim=64)
CAUSAL = case_of(256, dtype="bfloat16", head_dim=64, value_dim=64, causal=True)
LONG = case_of(1024, batch=1, q_heads=2, kv_heads=2, dtype="bfloat16", head_dim=64, value_dim=64, causal=True)
CAPPED = case_of(256, dtype="bfloat16", softcap=50.0, causal=True)


@cheat("formula", "inaccurate", "out is attention without its softcap", case=CAPPED)
class NoSoftcap(Plain):
    """Leaves out Gemma 2's softcap of 50, which scores of N(0, 1) never reach."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, softcap=None)


def _without_max(s: Tensor) -> Tensor:
    e = s.exp()
    return e / e.sum(-1, keepdim=True)


@cheat("formula", "inaccurate", OUT, passes=FORWARD)
class WithoutMaximum(Plain):
    """Does not subtract the row's maximum before the exponential, in fp32."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, weights=_without_max)


class _Scale(Plain):
    factor = 1.0

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q.float(), k.float(), v.float(), scale=self.factor).to(q.dtype)


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=HALF)
class ScaleOff4PerThousand(_Scale):
    """Multiplies scores by 0.996, in bf16."""

    factor = 0.996


@cheat("formula", "inaccurate", "out is attention with scores that are not scaled", passes=FORWARD, case=HALF)
class NotScaled(Plain):
    """Leaves the scores as products of q and k."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q.float(), k.float(), v.float(), scale=case.head_dim**0.5).to(q.dtype)


@cheat(
    "formula", "inaccurate", "out is attention with the scale of heads of 96", passes=FORWARD,
    case=case_of(256, head_dim=80, value_dim=80),
)  # fmt: skip
class ScaleOfThePaddedHead(Plain):
    """Pads heads of 80 channels to 96, and scales by the root of 96."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, scale=(case.head_dim / 96) ** 0.5)
