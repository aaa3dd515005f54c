"""Honest backends in a block, in fp8, compiled, in a duel."""

from typing import Any

from cheats.blocks import CAPPED_LAYER, DIT, FP8, LAYER, Codes
from cheats.corpus import FORWARD, honest
from cheats.ways import Plain, Run, Tensor, attend, grouped, hidden, softmax


@honest(case=LAYER)
class InALayer(Plain):
    """Computes the attention of a decoder layer."""


@honest(case=CAPPED_LAYER)
class CappedInALayer(Plain):
    """Computes the attention of a decoder layer with a softcap, in bf16."""


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


@honest(passes=FORWARD)
class ConstantInputs(Plain):
    """Keeps what does not depend on the inputs: mask and scale."""

    def prepared(self, case: Any, inputs: Any) -> Any:
        self.mask, self.scale = hidden(case, inputs.q_bhsd.device), case.head_dim**-0.5
        return inputs

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, mask=self.mask)


@honest(passes=FORWARD)
class LastResultKept(Plain):
    """Keeps a reference to its last output and frees it in the next call."""

    last: Tensor | None = None

    def forward(self, run: Run) -> Tensor:
        self.last = run()
        return self.last
