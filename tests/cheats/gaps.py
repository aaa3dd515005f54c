"""Gaps in the gradient of the output, and numbers that are not finite."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from attn_exp.backends.base import Calls, calls_of
from cheats.corpus import FORWARD, case_of, cheat, honest
from cheats.in_a_model import LONG, attention_with
from cheats.ways import Plain, Run, Tensor, attend, hidden


def as_if_adjacent(d_out: Tensor, out: Tensor) -> Tensor:
    """Return what lies in the gradient's memory if the numbers of each row are adjacent."""
    return d_out.as_strided(d_out.shape, (*d_out.stride()[:-1], 1))


def made_adjacent(d_out: Tensor, out: Tensor) -> Tensor:
    """Return the output's gradient, in which the numbers of each row are adjacent."""
    return d_out if d_out.stride(-1) == 1 else as_if_adjacent(d_out.contiguous(), out)


class _Reads(Plain):
    """Reads the output's gradient in a way of its own."""

    read: Callable[[Tensor, Tensor], Tensor]

    def prepare(self, case: Any, inputs: Any) -> Calls:
        return calls_of(partial(self.attention, case), inputs)

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_with(q, k, v, type(self).read)


@cheat(
    "gradients",
    "inaccurate",
    "the backward is wrong where the output's gradient has neighbours along a row that are not adjacent in memory",
    case=LONG,
)
class AssumesAdjacentNumbers(_Reads):
    """Reads the output's gradient by its strides, but for that of the channels, which it takes to be 1."""

    read = as_if_adjacent


@honest(case=LONG)
class CopiesWhatHasGaps(_Reads):
    """Takes the numbers of a row of the output's gradient to be adjacent, and copies it where they are not."""

    read = made_adjacent


@honest(passes=FORWARD)
class HidesWhatIsNoNumber(Plain):
    """Replaces what is not finite in its output."""

    def forward(self, run: Run) -> Tensor:
        return run().nan_to_num_()


@honest(case=case_of(128, batch=1, q_len=192, causal=True), passes=FORWARD)
class ZerosForRowsWithoutKeys(Plain):
    """Writes zeros over the NaN of rows without keys, which it knows by the mask."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hides = hidden(case, q.device)
        assert hides is not None
        out = attend(case, q, k, v, weights=partial(torch.softmax, dim=-1))
        return out.masked_fill(hides.all(-1, keepdim=True), 0.0)
