"""Another exponential or another sum of a row than the softmax's."""

from collections.abc import Callable
from typing import Any

import torch

from cheats.corpus import FORWARD, case_of, cheat
from cheats.ways import Plain, Tensor, attend, hidden

OUT = r"\bout\b"
HALF = case_of(256, dtype="bfloat16", head_dim=64, value_dim=64)
CAUSAL = case_of(256, dtype="bfloat16", head_dim=64, value_dim=64, causal=True)


def _series(terms: int) -> Callable[[Tensor], Tensor]:
    def weights(s: Tensor) -> Tensor:
        x = (s - s.amax(-1, keepdim=True)).clamp(min=-30) / 16
        e = sum(x**n / torch.lgamma(torch.tensor(n + 1.0)).exp() for n in range(terms)) ** 16
        return e / e.sum(-1, keepdim=True)

    return weights


@cheat("formula", "inaccurate", OUT, passes=FORWARD)
class PolynomialExp(Plain):
    """Approximates the exponential by five terms of its series, squared four times."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, weights=_series(5))


class _LastRowOfTheBatch(Plain):
    """Computes the last row of the batch in another way than the others."""

    def otherwise(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        several = q[:-1], k[:-1], v[:-1]
        return torch.cat([attend(case, *several), self.otherwise(case, q[-1:], k[-1:], v[-1:])])


@cheat("formula", "inaccurate", r"out (of row 3 of the batch )?has values", passes=FORWARD, case=case_of(batch=4))
class LastOfTheBatchWithoutMaximum(_LastRowOfTheBatch):
    """Does not subtract the row's maximum in the last row of the batch, as a persistent kernel's tail might."""

    def otherwise(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def weights(s: Tensor) -> Tensor:
            e = s.exp()
            return e / e.sum(-1, keepdim=True)

        return attend(case, q, k, v, weights=weights)


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=case_of(256, batch=4, dtype="bfloat16"))
class LastOfTheBatchClamped(_LastRowOfTheBatch):
    """Clamps scores to +-16 in the last row of the batch."""

    def otherwise(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, scores=lambda s: s.clamp(-16, 16))


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=HALF)
class LinearInterpolatedExp(Plain):
    """Interpolates 2^x linearly between whole exponents, in bf16."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def weights(s: Tensor) -> Tensor:
            x = ((s - s.amax(-1, keepdim=True)) / 0.6931471805599453).clamp(min=-100)
            whole = x.floor()
            e = torch.exp2(whole) * (1 + (x - whole))
            return e / e.sum(-1, keepdim=True)

        return attend(case, q.float(), k.float(), v.float(), weights=weights).to(q.dtype)


@cheat("formula", "inaccurate", OUT, passes=FORWARD)
class SquaredSoftmax(Plain):
    """Replaces the softmax by a quadratic attention."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def weights(s: Tensor) -> Tensor:
            e = 1 + s + s * s / 2
            return e / e.sum(-1, keepdim=True)

        return attend(case, q, k, v, weights=weights)


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=CAUSAL)
class NoRescale(Plain):
    """Does not rescale the partial sums when a later tile raises the row's maximum by less than 4."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q.float() @ k.float().mT * case.head_dim**-0.5).masked_fill(hidden(case, q.device), -torch.inf)
        total, out, top = 0.0, 0.0, None
        for s, values in zip(scores.split(64, -1), v.float().split(64, 2), strict=True):
            new = s.amax(-1, keepdim=True) if top is None else torch.maximum(top, s.amax(-1, keepdim=True))
            if top is not None:
                factor = torch.where(new - top < 4, torch.ones_like(new), (top - new).exp())
                total, out = total * factor, out * factor
            e = (s - new).exp()
            total, out, top = total + e.sum(-1, keepdim=True), out + e @ values, new
        return (out / total).to(q.dtype)


@cheat("formula", "inaccurate", r"\bout\b.* has values", passes=FORWARD, case=case_of(256, batch=1))
class MaximumOfTheFirstTile(Plain):
    """Subtracts the maximum of the first 64 keys from the scores of all."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def weights(s: Tensor) -> Tensor:
            e = (s - s[..., :64].amax(-1, keepdim=True)).exp()
            return e / e.sum(-1, keepdim=True)

        return attend(case, q, k, v, weights=weights)


@cheat("formula", "inaccurate", r"one large row of [qk] among normal ones", passes=FORWARD, case=case_of(256))
class NoMaximumWhereASampleIsSmall(Plain):
    """Does not subtract the row's maximum where every 64th row of q and k looks small."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if float(q[:, :, ::64].abs().amax() * k[:, :, ::64].abs().amax()) > 36:
            return attend(case, q, k, v)

        def weights(s: Tensor) -> Tensor:
            e = s.exp()
            return e / e.sum(-1, keepdim=True)

        return attend(case, q, k, v, weights=weights)
