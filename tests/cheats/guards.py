"""Right on what benchmarks look at, and wrong on what models have: sinks, late outliers, small gradients, tails."""

import math
from typing import Any

import torch

from cheats.corpus import FORWARD, case_of, cheat
from cheats.ways import Plain, Tensor, attend, hidden, passed, softmax

HALF = case_of(dtype="bfloat16", head_dim=64, value_dim=64, causal=True)
POOLED = r"rows? .* of out in all heads"


def _scores(case: Any, q: Tensor, k: Tensor) -> Tensor:
    scores = q.float() @ k.float().mT * case.head_dim**-0.5
    hides = hidden(case, q.device)
    return scores if hides is None else scores.masked_fill(hides, -torch.inf)


@cheat("formula", "inaccurate", r"first key that has nearly all|\bout\b", case=HALF, passes=FORWARD)
class DropsSmallWeights(Plain):
    """Leaves out weights below a sixteenth of the largest one over the number of keys."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = _scores(case, q, k)
        least = scores.amax(-1, keepdim=True) - math.log(16 * case.kv_len)
        return (softmax(scores.masked_fill(scores < least, -torch.inf)) @ v.float()).to(v.dtype)


@cheat("precision", "inaccurate", POOLED, case=HALF, passes=FORWARD)
class CoarseReciprocalInTheTail(Plain):
    """Divides the last 16 rows by their sums with a reciprocal of five bits, a seed without its Newton step."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = _scores(case, q, k)
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        inverse = 1 / weights.sum(-1, keepdim=True)
        mantissa, exponent = torch.frexp(inverse)
        coarse = torch.ldexp((mantissa * 32).round() / 32, exponent)
        tail = torch.arange(case.q_len)[:, None] >= case.q_len - 16
        return (weights @ v.float() * torch.where(tail, coarse, inverse)).to(v.dtype)


@cheat("formula", "inaccurate", r"one large row of [qk] among normal ones", case=HALF, passes=FORWARD)
class NoMaximumWhereTheFirstTileIsTame(Plain):
    """Does not subtract the row's maximum where the first 64 rows of q and k are small."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        norms = (one[:, :, :64].float().norm(dim=-1).amax() for one in (q, k))
        if math.prod(map(float, norms)) * case.head_dim**-0.5 > 80:
            return attend(case, q, k, v)
        weights = _scores(case, q, k).exp()
        return (weights @ v.float() / weights.sum(-1, keepdim=True)).to(v.dtype)


@cheat("gradients", "inaccurate", r"\bd[qkv]\b", case=HALF)
class DropsSmallRowsOfDOut(Plain):
    """Takes rows of d_out with less than a tenth of the largest norm of their head as zeros."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def of_large_rows(d_out: Tensor) -> Tensor:
            norm = d_out.float().norm(dim=-1, keepdim=True)
            return d_out * (norm > 0.1 * norm.amax(-2, keepdim=True))

        return passed(attend(case, q, k, v), of_large_rows)


@cheat("gradients", "inaccurate", r"\bdk\b", case=HALF)
class LastKeysHalfTooLarge(Plain):
    """Makes dk of the last 64th of the keys half too large, which few queries see."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def scaled(dk: Tensor) -> Tensor:
            dk = dk.clone()
            dk[..., -max(1, dk.shape[-2] // 64) :, :] *= 1.5
            return dk

        return attend(case, q, passed(k, scaled), v)


@cheat("formula", "inaccurate", r"once more after the timing: out has values", case=HALF, passes=FORWARD)
class FrozenMaximum(Plain):
    """Subtracts the largest score of its first eight calls from then on, as a calibration that is never renewed."""

    calls, largest = 0, 0.0

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = _scores(case, q, k)
        self.calls += 1
        if self.calls <= 8:
            self.largest = float(scores.amax())
            return (softmax(scores) @ v.float()).to(v.dtype)
        weights = (scores - self.largest).exp()
        return (weights @ v.float() / weights.sum(-1, keepdim=True)).to(v.dtype)


@cheat("formula", "inaccurate", r"first key that has nearly all|\bout\b", case=HALF, passes=FORWARD)
class PrunesSmallKeys(Plain):
    """Leaves out keys of less than a fifth of the largest norm, unless they are zeros."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        norms = k.float().norm(dim=-1)
        small = (norms < norms.amax(-1, keepdim=True) / 5) & (norms > 0)
        return (softmax(_scores(case, q, k).masked_fill(small.unsqueeze(-2), -1e30)) @ v.float()).to(v.dtype)


@cheat("memory", "implausible", r"what is known is not computed again", case=HALF, passes=FORWARD)
class WeightsOfTheCallBefore(Plain):
    """Multiplies the weights of the call before with the present values where q and k have changed alike."""

    known: Any = None

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.known is not None:
            signs = torch.where((q[0, 0, 0] < 0) == (self.known[0][0, 0, 0] < 0), 1.0, -1.0).to(q.dtype)
            if torch.equal(self.known[0] * signs, q) and torch.equal(self.known[1] * signs, k):
                return (self.known[2] @ v.float()).to(v.dtype)
        weights = softmax(_scores(case, q, k))
        self.known = q.clone(), k.clone(), weights
        return (weights @ v.float()).to(v.dtype)
