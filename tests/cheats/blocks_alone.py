"""Attention that is another one inside a block, or where it is compiled, than where it is judged by itself."""

from typing import Any

from attn_exp.core.record.request import Compile
from cheats.ways import Tensor, attend

COMPILED = Compile(mode="default")


def without_maximum(case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention without subtracting the row's maximum: scores inside a block are too small to overflow."""

    def weights(s: Tensor) -> Tensor:
        e = s.exp()
        return e / e.sum(-1, keepdim=True)

    return attend(case, q, k, v, weights=weights)
