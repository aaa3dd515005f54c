"""The same inside a transformer block, compiled, in fp8 and in a duel."""

from typing import Any

import torch

from attn_exp.core.record.request import Compile
from cheats.corpus import FORWARD, case_of, cheat
from cheats.ways import Plain, Run, Tensor, attend

LAYER = case_of(64, head_dim=16, value_dim=16, kv_heads=2, causal=True, workload="decoder_layer", mlp_dim=128)
DIT = case_of(64, head_dim=16, value_dim=16, workload="dit_block", mlp_dim=128)
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


FP8 = case_of(256, dtype="float8_e4m3fn", causal=True)


class Codes(Plain):
    """Dequantises codes, computes in float32 and returns bf16; subclasses err."""

    def numbers(self, case: Any) -> tuple[Tensor, Tensor, Tensor]:
        found = self.inputs.numbers()
        return found.q_bhsd, found.k_bhsd, found.v_bhsd

    def forward(self, run: Run) -> Tensor:
        return attend(self.case, *self.numbers(self.case)).bfloat16()


@cheat("fp8", "inaccurate", OUT, passes=FORWARD, case=FP8)
class ScalesIgnored(Codes):
    """Ignores the scale of v, in fp8."""

    def forward(self, run: Run) -> Tensor:
        q, k, _ = self.numbers(self.case)
        return attend(self.case, q, k, self.inputs.v_bhsd.float()).bfloat16()


@cheat("duel", "inaccurate", OUT, passes=FORWARD, rival=True)
class CachedRival(_KeptAttention):
    """Returns its first output for ever, in a duel with an honest rival."""


@cheat("duel", "error", r"RuntimeError: no more", passes=FORWARD, rival=True)
class RaisesInADuel(Plain):
    """Raises in its fifth call; its rival is measured to the end."""

    calls = 0

    def forward(self, run: Run) -> Tensor:
        self.calls += 1
        if self.calls > 4:
            raise RuntimeError("no more")
        return run()
