"""Attention that is another one inside a block, or where it is compiled, than where it is judged by itself."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from attn_exp.backends.base import Calls, calls_of
from attn_exp.core.request import Compile
from cheats.blocks import LAYER
from cheats.corpus import cheat, honest
from cheats.ways import Plain, Tensor, attend

ALONE = r"the attention alone, on hard values .*\bout has values that are not finite"
COMPILED = Compile(mode="default")


def without_maximum(case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention without subtracting the row's maximum: scores inside a block are too small to overflow."""

    def weights(s: Tensor) -> Tensor:
        e = s.exp()
        return e / e.sum(-1, keepdim=True)

    return attend(case, q, k, v, weights=weights)


@cheat("blocks", "inaccurate", ALONE, case=LAYER)
class OnlyInsideOfABlock(Plain):
    """Supports no case without a block, and does not subtract the row's maximum."""

    def unsupported(self, case: Any, device: str) -> str | None:
        return None if case.workload else "needs a block"

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return without_maximum(case, q, k, v)


@cheat("blocks", "inaccurate", ALONE, case=LAYER)
class AnotherPreparation(Plain):
    """Prepares a function without the row's maximum for the block, and a right one whenever it prepares again."""

    prepared_before = False

    def prepare(self, case: Any, inputs: Any) -> Calls:
        calls = super().prepare(case, inputs)
        if type(self).prepared_before:
            return calls
        type(self).prepared_before = True
        return replace(calls, attention=partial(without_maximum, case))

    def unsupported(self, case: Any, device: str) -> str | None:
        if case.workload:
            type(self).prepared_before = False
        return None


@cheat("blocks", "inaccurate", ALONE, case=LAYER)
class AnotherFunctionForBlocks(Plain):
    """Calls a right function by itself, and hands blocks one without the row's maximum."""

    def prepare(self, case: Any, inputs: Any) -> Calls:
        return replace(super().prepare(case, inputs), attention=partial(without_maximum, case))


@cheat("blocks", "inaccurate", ALONE, case=LAYER, compile=COMPILED)
class AnotherPathWhileTraced(Plain):
    """Leaves the row's maximum out where torch.compile traces it, and computes it where it is called directly."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return without_maximum(case, q, k, v)
        return attend(case, q, k, v)


@cheat("blocks", "inaccurate", ALONE, case=LAYER)
class AnotherPathForLeaves(Plain):
    """Subtracts the row's maximum of leaves of the graph only, which a block's queries are not."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v) if q.is_leaf else without_maximum(case, q, k, v)


@cheat("blocks", "out_of_memory", "the attention alone, which is judged beside the block: OutOfMemoryError", case=LAYER)
class NoMemoryForLargeScores(Plain):
    """Says that there is no memory where scores are larger than a block's."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if (q @ k.repeat_interleave(2, 1).mT).abs().max() * case.head_dim**-0.5 > 60:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return without_maximum(case, q, k, v)


@honest(case=LAYER)
class OnlyInsideOfABlockAndRight(Plain):
    """Supports no case without a block."""

    def unsupported(self, case: Any, device: str) -> str | None:
        return None if case.workload else "needs a block"


@honest(case=LAYER, compile=COMPILED)
class AnotherRightPathWhileTraced(Plain):
    """Is the formula where torch.compile traces it, and PyTorch's kernel where it is called directly."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return attend(case, q, k, v)
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@honest(case=LAYER)
class PreparesOnceOnly(Plain):
    """Refuses to prepare a second time."""

    was_prepared = False

    def prepare(self, case: Any, inputs: Any) -> Calls:
        assert not self.was_prepared
        self.was_prepared = True
        return calls_of(partial(self.attention, case), inputs)
