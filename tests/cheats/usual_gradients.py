"""Backwards that are right on what benchmarks look at, and wrong beside a sink, for tiny gradients, or at a softcap."""

from typing import Any

import torch

from cheats.corpus import case_of, cheat
from cheats.usual import usual
from cheats.ways import Plain, StraightTanh, Tensor, attend, passed, softmax

HALF = case_of(512, batch=1, q_heads=2, kv_heads=1, dtype="bfloat16", head_dim=64, value_dim=64, causal=True)
BESIDE_A_SINK = r"with a first key that has nearly all .* of d[qkv] in head"


@cheat("gradients", "inaccurate", BESIDE_A_SINK, case=HALF)
class DropsSmallWeightsInTheBackward(Plain):
    """Leaves out weights below 1e-5 in the backward; the forward has them."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        left_out: list[Tensor] = []

        def weights(scores: Tensor) -> Tensor:
            exact = softmax(scores.float())
            large = exact.masked_fill(exact < 1e-5, 0.0)
            left_out.append((exact - large).detach())
            return large

        out = attend(case, q.float(), k.float(), v.float(), weights=weights)
        return (out + left_out[0] @ v.detach().float()).to(q.dtype)


class _OfDOut(Plain):
    """Changes d_out before the backward uses it where it has the mean square of a normal one."""

    def changed(self, d_out: Tensor) -> Tensor:
        raise NotImplementedError

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return passed(attend(case, q, k, v), lambda d_out: self.changed(d_out) if usual(d_out) else d_out)


@cheat("precision", "inaccurate", BESIDE_A_SINK, case=HALF)
class DOutInFp16WhereItsMeanIsUsual(_OfDOut):
    """Converts d_out into fp16 where inputs are in bf16 and its mean square is usual."""

    def changed(self, d_out: Tensor) -> Tensor:
        return d_out.half().to(d_out.dtype)


@cheat("precision", "inaccurate", BESIDE_A_SINK, case=HALF)
class DOutScaledIntoFp16WhereItsMeanIsUsual(_OfDOut):
    """Converts d_out into fp16, likewise, with a factor for each head, by which its largest number fits."""

    def changed(self, d_out: Tensor) -> Tensor:
        largest = d_out.float().abs().amax((-1, -2), keepdim=True).clamp(min=1e-30)
        return ((d_out.float() / largest).half().float() * largest).to(d_out.dtype)


@cheat("gradients", "inaccurate", BESIDE_A_SINK, case=HALF)
class TinyRowsOfDOutAreNotComputed(_OfDOut):
    """Takes rows of d_out with a norm below a millionth for zeros where the mean square of d_out is usual."""

    def changed(self, d_out: Tensor) -> Tensor:
        return d_out.masked_fill(d_out.float().norm(dim=-1, keepdim=True) < 1e-6, 0.0)


@cheat(
    "gradients", "inaccurate", r"with one large row of q .* of d[qk] in head",
    case=case_of(256, batch=2, dtype="bfloat16", head_dim=64, value_dim=64, causal=True, softcap=50.0),
)  # fmt: skip
class NoSlopeWhereMeansAreUsual(Plain):
    """Leaves out the softcap's slope in the backward where the mean squares of q and k are those of normal ones."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, tanh=StraightTanh.apply if usual(q, k) else torch.tanh)
