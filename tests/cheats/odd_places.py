"""Honest backends in a block, in fp8, compiled, in a duel."""

from typing import Any

from cheats.blocks import DIT, FP8, LAYER, Codes
from cheats.corpus import FORWARD, honest
from cheats.ways import Plain, Tensor, grouped, softmax


@honest(case=LAYER)
class InALayer(Plain):
    """Computes the attention of a decoder layer."""


@honest(case=DIT)
class InADitBlock(Plain):
    """Computes the attention of a DiT block with float32 inside."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softmax(q.double() @ grouped(case, k).double().mT * case.head_dim**-0.5).to(v.dtype) @ grouped(case, v)


@honest(case=FP8, passes=FORWARD)
class InCodes(Codes):
    """Computes fp8 codes in float32 and returns bf16."""


@honest(rival=True)
class AgainstItself(Plain):
    """Is measured in a duel with its own kind."""
