"""Another formula than the case's, near enough on N(0, 1) to pass for rounding."""

from typing import Any

from cheats.corpus import FORWARD, case_of, cheat
from cheats.ways import Plain, Run, StraightTanh, Tensor, attend

OUT = r"\bout\b"
ANY = r"\b(out|dq|dk|dv)\b"
HALF = case_of(256, dtype="bfloat16", head_dim=64, value_dim=64)
CAUSAL = case_of(256, dtype="bfloat16", head_dim=64, value_dim=64, causal=True)
LONG = case_of(1024, batch=1, q_heads=2, kv_heads=2, dtype="bfloat16", head_dim=64, value_dim=64, causal=True)
CAPPED = case_of(256, dtype="bfloat16", softcap=50.0, causal=True)


@cheat("formula", "inaccurate", r"\bout\b.*softcap of 50 were left out", case=CAPPED)
class NoSoftcap(Plain):
    """Leaves out Gemma 2's softcap of 50, which scores of N(0, 1) never reach."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, softcap=None)


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=CAPPED)
class AnotherSoftcap(Plain):
    """Caps scores at 30 instead of 50."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, softcap=30.0)


@cheat("formula", "inaccurate", r"\bd[qkv]\b", case=CAPPED)
class NoSoftcapInBackward(Plain):
    """Leaves out the softcap's slope in the backward."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, tanh=StraightTanh.apply)


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
