"""The same inside a transformer block, compiled, in fp8 and in a duel."""

from dataclasses import replace
from typing import Any

import torch

from attn_exp.core.request import Compile
from cheats.corpus import BOTH, FORWARD, case_of, cheat
from cheats.ways import Plain, Run, Tensor, attend

LAYER = case_of(64, head_dim=16, value_dim=16, kv_heads=2, causal=True, workload="decoder_layer", mlp_dim=128)
DIT = case_of(64, head_dim=16, value_dim=16, workload="dit_block", mlp_dim=128)
HALF_LAYER = replace(LAYER, head_dim=64, value_dim=64, q_len=128, kv_len=128, dtype="bfloat16")
CAPPED_LAYER = replace(LAYER, softcap=50.0, dtype="bfloat16")
OUT = r"\bout\b|result of the first call"


class _KeptAttention(Plain):
    """Keeps the attention's first output."""

    kept: Tensor | None = None

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = attend(case, q, k, v).detach()
        return self.kept


@cheat("blocks", "inaccurate", OUT, passes=FORWARD, case=LAYER, seen="flashinfer-bench#21")
class CachedInALayer(_KeptAttention):
    """Keeps the attention of the first call, inside a decoder layer."""


@cheat("blocks", "inaccurate", OUT, passes=FORWARD, case=DIT, seen="flashinfer-bench#21")
class CachedInADitBlock(_KeptAttention):
    """Keeps the attention of the first call, inside a DiT block."""


@cheat("blocks", ("inaccurate", "error"), r"differentiated|\b(out|d\w+)\b", passes=BOTH, case=LAYER)
class DetachedInALayer(Plain):
    """Computes the attention of a decoder layer without a graph."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q.detach(), k.detach(), v.detach())


@cheat("blocks", "inaccurate", OUT, passes=FORWARD, case=LAYER)
class WrongHeadsInALayer(Plain):
    """Maps grouped heads wrongly, inside a decoder layer."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = q @ k.repeat(1, 2, 1, 1).mT * case.head_dim**-0.5
        mask = torch.ones(case.q_len, case.kv_len, dtype=torch.bool).triu(1)
        return torch.softmax(p.masked_fill(mask, -torch.inf), -1) @ v.repeat(1, 2, 1, 1)


@cheat("blocks", "inaccurate", OUT, passes=FORWARD, case=LAYER)
class UnmaskedInALayer(Plain):
    """Leaves out the causal mask, inside a decoder layer."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, mask=None)


@cheat("blocks", "inaccurate", r"the attention alone, on hard values .*softcap of 50 were left out", case=CAPPED_LAYER)
class NoSoftcapInALayer(Plain):
    """Leaves out a softcap that the scores inside a decoder layer never reach."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, softcap=None)


@cheat("blocks", "inaccurate", r"\bout\b", passes=FORWARD, case=DIT)
class WithoutMaximumInADitBlock(Plain):
    """Does not subtract the row's maximum, inside a DiT block."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def weights(s: Tensor) -> Tensor:
            e = s.exp()
            return e / e.sum(-1, keepdim=True)

        return attend(case, q, k, v, weights=weights)


@cheat("blocks", "inaccurate", OUT, passes=FORWARD, case=DIT)
class HalfTheHeadsInADitBlock(Plain):
    """Computes half of the heads, inside a DiT block."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(case, q[:, :2], k[:, :2], v[:, :2])
        return torch.cat([out, torch.zeros_like(out)], 1)


@cheat("blocks", "inaccurate", OUT, passes=FORWARD, compile=Compile(mode="default"))
class CompiledConstant(Plain):
    """Lets torch.compile bake the first call's weights in as a constant."""

    kept: Tensor | None = None

    def prepared(self, case: Any, inputs: Any) -> Any:
        q, k, _ = inputs.qkv
        self.kept = torch.softmax(q @ k.mT * case.head_dim**-0.5, -1).detach()
        return inputs

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.kept @ v + 0 * (q.sum() + k.sum())


@cheat(
    "blocks", "inaccurate", OUT, passes=FORWARD, compile=Compile(mode="default"), case=case_of(kv_len=1016, q_len=64)
)
class CompiledPadding(Plain):
    """Pads keys with zeros and does not mask them, compiled."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (torch.nn.functional.pad(one, (0, 0, 0, 8)) for one in (k, v))
        return attend(case, q, k, v, mask=None)


FP8 = case_of(256, dtype="float8_e4m3fn", causal=True)


class Codes(Plain):
    """Dequantises codes, computes in float32 and returns bf16; subclasses err."""

    def numbers(self, case: Any) -> tuple[Tensor, Tensor, Tensor]:
        found = self.inputs.numbers()
        return found.q_bhsd, found.k_bhsd, found.v_bhsd

    def forward(self, run: Run) -> Tensor:
        return attend(self.case, *self.numbers(self.case)).bfloat16()


@cheat("fp8", "inaccurate", OUT, passes=FORWARD, case=FP8)
class CachedCodes(Codes):
    """Returns its first output for ever, in fp8."""

    kept: Tensor | None = None

    def forward(self, run: Run) -> Tensor:
        if self.kept is None:
            self.kept = super().forward(run)
        return self.kept


@cheat("fp8", "inaccurate", OUT, passes=FORWARD, case=FP8)
class DequantisedOnce(Codes):
    """Dequantises its inputs in its first call and uses those numbers for ever."""

    kept: Any = None

    def numbers(self, case: Any) -> Any:
        if self.kept is None:
            self.kept = super().numbers(case)
        return self.kept


@cheat("fp8", "inaccurate", OUT, passes=FORWARD, case=FP8)
class EveryHundredthCodeRow(Codes):
    """Leaves every 100th row zero, in fp8."""

    def forward(self, run: Run) -> Tensor:
        out = super().forward(run)
        out[:, :, ::100] = 0
        return out


@cheat("fp8", "inaccurate", OUT, passes=FORWARD, case=FP8)
class LastCodeRowsNegated(Codes):
    """Turns the sign of the last two rows of one head, in fp8."""

    def forward(self, run: Run) -> Tensor:
        out = super().forward(run)
        out[1, 2, -2:] *= -1
        return out


@cheat("fp8", "inaccurate", OUT, passes=FORWARD, case=FP8)
class ScaleOff5PerCentInFp8(Codes):
    """Multiplies scores by 1.05, in fp8."""

    def forward(self, run: Run) -> Tensor:
        return attend(self.case, *self.numbers(self.case), scale=1.05).bfloat16()


@cheat("fp8", "inaccurate", OUT, passes=FORWARD, case=FP8)
class OutputOff5PerCentInFp8(Codes):
    """Multiplies the output by 1.05, as a wrong descale factor would, in fp8."""

    def forward(self, run: Run) -> Tensor:
        return (attend(self.case, *self.numbers(self.case)) * 1.05).bfloat16()


@cheat("fp8", "inaccurate", OUT, passes=FORWARD, case=FP8)
class WindowInFp8(Codes):
    """Uses the last 128 keys of each query, which nobody asked for, in fp8."""

    def forward(self, run: Run) -> Tensor:
        row, key = torch.arange(self.case.q_len)[:, None], torch.arange(self.case.kv_len)[None]
        mask = (key > row) | (key <= row - 128)
        return attend(self.case, *self.numbers(self.case), mask=mask).bfloat16()


@cheat("fp8", "inaccurate", OUT, passes=FORWARD, case=FP8)
class ScalesIgnored(Codes):
    """Ignores the scale of v, in fp8."""

    def forward(self, run: Run) -> Tensor:
        q, k, _ = self.numbers(self.case)
        return attend(self.case, q, k, self.inputs.v_bhsd.float()).bfloat16()


@cheat("duel", "inaccurate", OUT, passes=FORWARD, rival=True)
class CachedRival(_KeptAttention):
    """Returns its first output for ever, in a duel with an honest rival."""


@cheat("duel", "inaccurate", r"\bd[qkv]\b|result of the first call", passes=BOTH, rival=True)
class FirstGradientsRival(Plain):
    """Returns its first gradients for ever, in a duel with an honest rival."""

    kept: Any = None

    def backward(self, run: Run) -> Any:
        self.kept = self.kept or run()
        return self.kept


@cheat("duel", "inaccurate", r"\bout\b|input", passes=FORWARD, rival=True)
class SpoilsItsInputsInADuel(Plain):
    """Scales its inputs in place in each call; its rival's numbers must not suffer."""

    def forward(self, run: Run) -> Tensor:
        self.inputs.q_bhsd.data.mul_(1.01)
        return run()


@cheat("duel", "error", r"RuntimeError: no more", passes=FORWARD, rival=True)
class RaisesInADuel(Plain):
    """Raises in its fifth call; its rival is measured to the end."""

    calls = 0

    def forward(self, run: Run) -> Tensor:
        self.calls += 1
        if self.calls > 4:
            raise RuntimeError("no more")
        return run()
