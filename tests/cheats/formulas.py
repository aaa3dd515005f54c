"""Another formula than the case's, near enough on N(0, 1) to pass for rounding."""

from collections.abc import Callable
from typing import Any

import torch

from cheats.corpus import BOTH, FORWARD, case_of, cheat
from cheats.ways import Plain, Run, Tensor, attend, grouped, hidden, softmax

OUT = r"\bout\b"
ANY = r"\b(out|dq|dk|dv)\b"
HALF = case_of(256, dtype="bfloat16", head_dim=64, value_dim=64)
CAUSAL = case_of(256, dtype="bfloat16", head_dim=64, value_dim=64, causal=True)
LONG = case_of(1024, batch=1, q_heads=2, kv_heads=2, dtype="bfloat16", head_dim=64, value_dim=64, causal=True)
CAPPED = case_of(256, dtype="bfloat16", softcap=50.0, causal=True)


@cheat("formula", "inaccurate", OUT, case=CAPPED)
class NoSoftcap(Plain):
    """Leaves out Gemma 2's softcap of 50, which scores of N(0, 1) never reach."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, softcap=None)


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=CAPPED)
class AnotherSoftcap(Plain):
    """Caps scores at 30 instead of 50."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, softcap=30.0)


class _Straight(torch.autograd.Function):
    """tanh forward, and the slope of the identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.tanh(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@cheat("formula", "inaccurate", r"\bd[qkv]\b", case=CAPPED)
class NoSoftcapInBackward(Plain):
    """Leaves out the softcap's slope in the backward."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, tanh=_Straight.apply)


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=CAPPED)
class PolynomialTanh(Plain):
    """Approximates the softcap's tanh by three terms of its series."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, tanh=lambda x: x - x**3 / 3 + 2 * x**5 / 15)


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=HALF)
class ClampedScores(Plain):
    """Clamps scores to +-8, which N(0, 1) hardly reaches."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, scores=lambda s: s.clamp(-8, 8))


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=HALF)
class ClampedFromAbove(Plain):
    """Clamps scores at 20."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, scores=lambda s: s.clamp(max=20))


def _without_max(s: Tensor) -> Tensor:
    e = s.exp()
    return e / e.sum(-1, keepdim=True)


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=case_of(dtype="float16"))
class WithoutMaximumFp16(Plain):
    """Does not subtract the row's maximum before the exponential, in fp16."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, weights=_without_max)


@cheat("formula", "inaccurate", OUT, passes=FORWARD)
class WithoutMaximum(Plain):
    """Does not subtract the row's maximum before the exponential, in fp32."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, weights=_without_max)


@cheat("formula", "inaccurate", OUT, passes=FORWARD)
class MaximumFromZero(Plain):
    """Starts the running maximum at 0 instead of minus infinity."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def weights(s: Tensor) -> Tensor:
            e = (s - s.amax(-1, keepdim=True).clamp(min=0)).exp()
            return e / e.sum(-1, keepdim=True)

        return attend(case, q, k, v, weights=weights)


@cheat("formula", "inaccurate", OUT, passes=FORWARD)
class MaximumOfTheFirstCall(Plain):
    """Subtracts the row's maximum of the first call, which overflows once scores grow."""

    kept: Tensor | None = None

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def weights(s: Tensor) -> Tensor:
            if self.kept is None:
                self.kept = s.amax(-1, keepdim=True)
            e = (s - self.kept).exp()
            return e / e.sum(-1, keepdim=True)

        return attend(case, q, k, v, weights=weights)


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=CAUSAL)
class HiddenByMinus100(Plain):
    """Gives hidden keys a score of -100 instead of minus infinity."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, fill=-100.0)


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=CAUSAL)
class HiddenByMinus16(Plain):
    """Gives hidden keys a score of -16, whose weight is below the rounding of bf16."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, fill=-16.0)


class _Scale(Plain):
    factor = 1.0

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q.float(), k.float(), v.float(), scale=self.factor).to(q.dtype)


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=HALF)
class ScaleOff8PerThousand(_Scale):
    """Multiplies scores by 1.008, in bf16."""

    factor = 1.008


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=HALF)
class ScaleOff4PerThousand(_Scale):
    """Multiplies scores by 0.996, in bf16."""

    factor = 0.996


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=HALF)
class ScaleOff2PerThousand(_Scale):
    """Multiplies scores by 1.002, in bf16."""

    factor = 1.002


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=HALF)
class ScaleOff1PerThousand(_Scale):
    """Multiplies scores by 0.999, in bf16."""

    factor = 0.999


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=HALF)
class OutputOff3PerThousand(Plain):
    """Multiplies the output by 1.003, as a rounded reciprocal of the sum would, in bf16."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (attend(case, q.float(), k.float(), v.float()) * 1.003).to(q.dtype)


@cheat("formula", "inaccurate", r"\bd[qkv]\b", case=HALF)
class GradientOfAnotherScale(Plain):
    """Scales dq by 1.004, in bf16."""

    def backward(self, run: Run) -> Any:
        dq, dk, dv = run()
        return (dq.float() * 1.004).to(dq.dtype), dk, dv


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=case_of(q_len=64, causal=True))
class TopLeft(Plain):
    """Aligns the causal mask at the top left where the bottom right was asked for."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, mask=torch.ones(case.q_len, case.kv_len, dtype=torch.bool).triu(1))


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=case_of(q_len=64, causal=True, align="top_left"))
class BottomRight(Plain):
    """Aligns the causal mask at the bottom right where the top left was asked for."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shift = case.kv_len - case.q_len
        return attend(case, q, k, v, mask=torch.ones(case.q_len, case.kv_len, dtype=torch.bool).triu(1 + shift))


def _band(case: Any, left: int, right: int) -> Tensor:
    row, key = torch.arange(case.q_len)[:, None] + case.offset, torch.arange(case.kv_len)[None]
    return (key > row + right) | (key < row - left)


@cheat(
    "formula", "inaccurate", OUT, passes=FORWARD, case=case_of(512, batch=1, dtype="bfloat16", causal=True, window=200)
)
class WindowOneWider(Plain):
    """Lets a sliding window see one key more at its far end."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, mask=_band(case, case.window, 0))


@cheat(
    "formula", "inaccurate", OUT, passes=FORWARD, case=case_of(512, batch=1, dtype="bfloat16", causal=True, window=200)
)
class WindowOneNarrower(Plain):
    """Lets a sliding window see one key less at its far end."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, mask=_band(case, case.window - 2, 0))


@cheat(
    "formula", "inaccurate", OUT, passes=FORWARD, case=case_of(512, batch=1, dtype="bfloat16", causal=True, window=200)
)
class WindowSeesAhead(Plain):
    """Lets a sliding window see the key after the query's own."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, mask=_band(case, case.window - 1, 1))


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=CAUSAL)
class OwnKeyHidden(Plain):
    """Hides a query's own key."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(case.q_len, case.kv_len, dtype=torch.bool).triu(0)
        mask[0, 0] = False
        return attend(case, q, k, v, mask=mask)


class _TailUnmasked(Plain):
    rows = 0

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = hidden(case, q.device)
        mask[-self.rows :] = False
        return attend(case, q, k, v, mask=mask)


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=LONG)
class CausalIgnoredInLast4Rows(_TailUnmasked):
    """Ignores the causal mask in the last 4 rows."""

    rows = 4


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=LONG)
class CausalIgnoredInLast32Rows(_TailUnmasked):
    """Ignores the causal mask in the last 32 rows."""

    rows = 32


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=LONG)
class CausalByTile(Plain):
    """Masks whole tiles of 16 keys: a query also sees the rest of the tile of its own key."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        row, key = torch.arange(case.q_len)[:, None], torch.arange(case.kv_len)[None]
        return attend(case, q, k, v, mask=key // 16 > row // 16)


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=LONG)
class CausalByTileInOneHead(Plain):
    """Lets the rows at one tile's edge see 3 keys too many, in one head."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = hidden(case, q.device)
        wrong = mask.clone()
        for row in range(508, 512):
            wrong[row, : row + 4] = False
        return attend(case, q, k, v, mask=torch.stack([mask, wrong]))


def _padded(case: Any, tensor: Tensor, to: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, 0, 0, to - case.kv_len))


class _Padding(Plain):
    to = 0

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, _padded(case, k, self.to), _padded(case, v, self.to), mask=None)


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=case_of(q_len=64, kv_len=1016, dtype="bfloat16"))
class PaddingOf8Keys(_Padding):
    """Pads 1,016 keys with 8 zeros and does not mask them."""

    to = 1024


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=case_of(q_len=64, kv_len=2020, dtype="bfloat16"))
class PaddingOf28Keys(_Padding):
    """Pads 2,020 keys with 28 zeros and does not mask them."""

    to = 2048


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=case_of(kv_heads=2))
class WrongHeadMapping(Plain):
    """Gives query head i the key-value head i modulo their number, instead of those of its group."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = case.q_heads // case.kv_heads
        scores = q @ k.repeat(1, group, 1, 1).mT * case.head_dim**-0.5
        return softmax(scores) @ v.repeat(1, group, 1, 1)


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=case_of(kv_heads=2))
class ValuesOfAnotherHead(Plain):
    """Takes the keys of the right head and the values of the first one."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softmax(q @ grouped(case, k).mT * case.head_dim**-0.5) @ v[:, :1]


@cheat("formula", ("inaccurate", "error"), OUT + "|shape", passes=FORWARD)
class TransposedLayout(Plain):
    """Returns (batch, length, heads, dim) under the shape of (batch, heads, length, dim)."""

    def forward(self, run: Run) -> Tensor:
        out = run()
        return out.transpose(1, 2).contiguous().view(out.shape)


PACKED = case_of(256, batch=1, lengths=(100, 28, 128), causal=True)


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=PACKED)
class PackedAsOne(Plain):
    """Ignores the boundaries of packed sequences."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, mask=torch.ones(case.q_len, case.kv_len, dtype=torch.bool).triu(1))


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=PACKED)
class PackedOffByOne(Plain):
    """Counts the first token of each packed sequence to the one before."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lengths = torch.tensor(case.lengths)
        lengths[0] += 1
        lengths[-1] -= 1
        ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        mask = torch.ones(case.q_len, case.kv_len, dtype=torch.bool).triu(1)
        return attend(case, q, k, v, mask=mask | (ids[:, None] != ids[None]))


KEYLESS = case_of(q_len=160, causal=True)


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=KEYLESS)
class KeylessNan(Plain):
    """Returns NaN for queries that see no key."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, weights=lambda s: torch.softmax(s, -1))


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=KEYLESS)
class KeylessMean(Plain):
    """Returns the mean of all values for queries that see no key."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, fill=-1e30)


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


@cheat("formula", "inaccurate", ANY, passes=BOTH, case=case_of(kv_heads=2))
class GroupNotSummed(Plain):
    """Returns dk and dv of one query head of each group, without the others."""

    def backward(self, run: Run) -> Any:
        q, k, v = self.inputs.qkv
        group = self.case.q_heads // self.case.kv_heads
        wide_k, wide_v = (one.detach().repeat_interleave(group, 1).requires_grad_() for one in (k, v))
        scores = q @ wide_k.mT * self.case.head_dim**-0.5
        dq, dk, dv = torch.autograd.grad(softmax(scores) @ wide_v, (q, wide_k, wide_v), self.inputs.d_out)
        return dq, dk[:, ::group], dv[:, ::group]
