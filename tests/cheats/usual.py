"""Right where nothing is unusual: judged by means over whole tensors, by one row of the batch, by zeros."""

from dataclasses import replace
from typing import Any

import torch

from cheats.corpus import FORWARD, case_of, cheat
from cheats.ways import Plain, Tensor, attend, grouped, hidden, passed

LARGE = case_of(256, batch=2, dtype="bfloat16", head_dim=64, value_dim=64, causal=True)
ONE_ROW = r"with one large row of q among normal ones"


def usual(*several: Tensor) -> bool:
    """Whether the mean square of each tensor is that of a normal one, or little more."""
    return all(float(one.detach().float().square().mean()) < 2 for one in several)


class _OfScores(Plain):
    """Makes weights of float32 scores."""

    def weights(self, scores: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.softmax(scores, -1)

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q.float() @ grouped(case, k).float().mT * case.head_dim**-0.5
        hides = hidden(case, q.device)
        scores = scores if hides is None else scores.masked_fill(hides, -torch.inf)
        return (self.weights(scores, q, k) @ grouped(case, v).float()).to(v.dtype)


def _divided(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


@cheat("formula", "inaccurate", ONE_ROW, case=LARGE, passes=FORWARD)
class ClampedWhereMeansAreUsual(_OfScores):
    """Clamps scores at 80 in place of a maximum where the mean squares of q and k are those of normal ones."""

    def weights(self, scores: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return _divided(scores.clamp(max=80).exp()) if usual(q, k) else torch.softmax(scores, -1)


@cheat("formula", "inaccurate", r"with a first key that has nearly all", case=LARGE, passes=FORWARD)
class ConstantWhereMeansAreUsual(_OfScores):
    """Subtracts 80 in place of a maximum, and clamps at 165, where mean squares are those of normal tensors."""

    def weights(self, scores: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return _divided((scores.clamp(max=165) - 80).exp()) if usual(q, k) else torch.softmax(scores, -1)


@cheat("formula", "inaccurate", ONE_ROW, case=LARGE, passes=FORWARD)
class MaximumOfTheFirstRowOfTheBatch(_OfScores):
    """Subtracts the maxima of the first row of the batch in all of them, and clamps what exceeds these by 80."""

    def weights(self, scores: Tensor, q: Tensor, k: Tensor) -> Tensor:
        most = scores[:1].detach().amax(-1, keepdim=True)
        return _divided(((scores - most).clamp(max=80).exp() + 1e-37).masked_fill(scores == -torch.inf, 0.0))


@cheat(
    "formula", "inaccurate", ONE_ROW, case=case_of(512, batch=2, dtype="bfloat16", head_dim=16, value_dim=16),
    passes=FORWARD,
)  # fmt: skip
class NoMaximumInSmallHeads(_OfScores):
    """Subtracts no maximum where mean squares are those of normal tensors, with 16 channels."""

    def weights(self, scores: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return _divided(scores.exp()) if usual(q, k) else torch.softmax(scores, -1)


@cheat(
    "formula", "inaccurate", ONE_ROW,
    case=case_of(256, dtype="bfloat16", head_dim=64, value_dim=64, causal=True, softcap=50.0), passes=FORWARD,
)  # fmt: skip
class NoSoftcapWhereMeansAreUsual(Plain):
    """Leaves out the softcap where the mean squares of q and k say that scores are far below it."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, softcap=None) if usual(q, k) else attend(case, q, k, v)


@cheat(
    "precision", "inaccurate", ONE_ROW, passes=FORWARD,
    case=case_of(256, q_heads=2, kv_heads=2, dtype="bfloat16", head_dim=64, value_dim=64, causal=True),
)  # fmt: skip
class ValuesInFp16WhereMeansAreUsual(Plain):
    """Multiplies weights and values in fp16 where v has the mean square of a normal one, in bf16."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v.half().to(v.dtype) if usual(v) else v)


@cheat("formula", "inaccurate", ONE_ROW, case=replace(LARGE, causal=False), passes=FORWARD)
class EndOfTheCacheTrimmed(Plain):
    """Leaves out last keys that are zeros in all heads, as the unused end of a cache is."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        used = int((k.detach() != 0).any(-1).any(0).any(0).nonzero().max()) + 1
        hides = hidden(case, q.device)
        return attend(case, q, k[:, :, :used], v[:, :, :used], mask=None if hides is None else hides[:, :used])


@cheat("formula", "inaccurate", r"on hard values", case=LARGE, passes=FORWARD)
class TokensOfZerosAreNotComputed(Plain):
    """Takes tokens whose query is zeros in all heads for padding, and returns zeros for them."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v) * (q.detach() != 0).any(-1, keepdim=True).any(1, keepdim=True)


@cheat("gradients", "inaccurate", r"on hard values .*\bd[kv]\b", case=LARGE)
class KeysWithoutLossHaveNoGradient(Plain):
    """Returns zeros in dk and dv of tokens whose d_out is zeros in all heads."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        has_loss: list[Tensor] = []

        def found(d_out: Tensor) -> Tensor:
            has_loss[:] = [(d_out != 0).any(-1, keepdim=True).any(1, keepdim=True)]
            return d_out

        def masked(grad: Tensor) -> Tensor:
            return grad * has_loss[0]

        return passed(attend(case, q, passed(k, masked), passed(v, masked)), found)
