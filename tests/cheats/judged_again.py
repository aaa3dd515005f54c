"""What only a judgement after the timing shows: another way from some call on, gaps in a gradient, NaN."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from attn_exp.backends.base import Calls, calls_of
from attn_exp.core.request import Compile
from cheats.blocks import DIT, LAYER
from cheats.blocks_alone import without_maximum
from cheats.corpus import FORWARD, case_of, cheat, honest
from cheats.in_a_model import LONG, attention_with
from cheats.ways import Plain, Run, Tensor, attend, hidden, passed

AGAIN = r"the attention alone, on hard values .*, once more after the timing: out has values that are not finite"
NORMAL_AGAIN = r"the attention alone, on normal values, once more after the timing: out"
COMPILED = Compile(mode="default")
HALF_DIT = case_of(64, head_dim=16, value_dim=16, workload="dit_block", mlp_dim=128, dtype="bfloat16")
# Calls of the attention before the timing are fewer: the first one, those on other values, and the warm-up.
FROM = 13


class _OtherFromSomeCallOn(Plain):
    """Computes attention, and from the 13th call on something else."""

    calls = 0

    def other(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return what later calls return."""
        return without_maximum(case, q, k, v)

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.calls += 1
        return self.other(case, q, k, v) if self.calls >= FROM else attend(case, q, k, v)


@cheat("blocks", "inaccurate", AGAIN, case=LAYER)
class WithoutMaximumFromSomeCallOn(_OtherFromSomeCallOn):
    """Leaves the row's maximum out from the 13th call on, inside a decoder layer."""


@cheat("blocks", "inaccurate", AGAIN, case=DIT)
class WithoutMaximumFromSomeCallOnInADitBlock(_OtherFromSomeCallOn):
    """Leaves the row's maximum out from the 13th call on, inside a DiT block."""


@cheat("blocks", "inaccurate", NORMAL_AGAIN, case=HALF_DIT, passes=FORWARD)
class CodesFromSomeCallOn(_OtherFromSomeCallOn):
    """Rounds q, k and v to codes of seven bits from the 13th call on, which a block's output hides."""

    def other(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def codes(x: Tensor) -> Tensor:
            step = x.detach().abs().amax(-1, keepdim=True) / 63
            return (x / step).round() * step

        return attend(case, codes(q), codes(k), codes(v))


_COUNTED: list[int] = [0]


@torch.library.custom_op("cheats::counted", mutates_args=())
def _counted(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    _COUNTED[0] += 1
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT * scale
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    if _COUNTED[0] < FROM:
        scores = scores - scores.amax(-1, keepdim=True)
    e = scores.exp()
    return e / e.sum(-1, keepdim=True) @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


@_counted.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return q.new_empty(q.shape)


@cheat("blocks", "inaccurate", AGAIN, case=LAYER, compile=COMPILED, passes=FORWARD)
class WithoutMaximumFromSomeCallOnCompiled(Plain):
    """Is an operator that leaves the row's maximum out from the 13th call on, inside a compiled decoder layer."""

    def prepared(self, case: Any, inputs: Any) -> Any:
        _COUNTED[0] = 0
        return inputs

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made: Tensor = _counted(q, k, v, case.head_dim**-0.5)
        return made


@honest(case=LAYER)
class OtherWayFromSomeCallOn(_OtherFromSomeCallOn):
    """Computes with powers of two from the 13th call on, inside a decoder layer."""

    def other(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def weights(scores: Tensor) -> Tensor:
            e = torch.exp2((scores - scores.amax(-1, keepdim=True)) * 1.4426950408889634)
            return e / e.sum(-1, keepdim=True)

        return attend(case, q, k, v, weights=weights)


def as_if_adjacent(d_out: Tensor, out: Tensor) -> Tensor:
    """Return what lies in the gradient's memory if the numbers of each row are adjacent."""
    return d_out.as_strided(d_out.shape, (*d_out.stride()[:-1], 1))


def if_adjacent(d_out: Tensor, out: Tensor) -> Tensor:
    """Return the output's gradient."""
    if d_out.stride(-1) != 1:
        raise ValueError("the numbers of a row have to be adjacent")
    return d_out


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
    "after the timing: the backward is wrong where the output's gradient has neighbours along a row that are not "
    "adjacent in memory: d[qkv] ",
    case=LONG,
)
class AssumesAdjacentNumbers(_Reads):
    """Reads the output's gradient by its strides, but for that of the channels, which it takes to be 1."""

    read = as_if_adjacent


@honest(case=LONG)
class RefusesGaps(_Reads):
    """Raises if the numbers of a row of the output's gradient are not adjacent."""

    read = if_adjacent


@honest(case=LONG)
class CopiesWhatHasGaps(_Reads):
    """Takes the numbers of a row of the output's gradient to be adjacent, and copies it where they are not."""

    read = made_adjacent


@cheat(
    "formula", "inaccurate", r"^after the timing: a NaN in row \d+ of q leaves that row of out finite", passes=FORWARD
)
class HidesWhatIsNoNumber(Plain):
    """Replaces what is not finite in its output."""

    def forward(self, run: Run) -> Tensor:
        return run().nan_to_num_()


@cheat("formula", "inaccurate", r"^after the timing: a NaN in row \d+ of q leaves that row of out finite")
class HidesWhatIsNoNumberInWeights(Plain):
    """Replaces what is not finite in the weights, as if that came only from rows without keys."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, p=torch.nan_to_num)


@cheat("gradients", "inaccurate", r"^after the timing: a NaN in row \d+ of d_out leaves dq finite")
class HidesWhatIsNoNumberInGradients(Plain):
    """Replaces what is not finite in its gradients."""

    def backward(self, run: Run) -> Any:
        return tuple(one.nan_to_num() for one in run())


@cheat("gradients", "inaccurate", r"^after the timing: a NaN in row \d+ of d_out leaves dq finite")
class HidesWhatIsNoNumberInTheGradient(Plain):
    """Replaces what is not finite in the gradient that comes in, before the backward."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return passed(attend(case, q, k, v), torch.nan_to_num)


@honest(case=case_of(128, batch=1, q_len=192, causal=True), passes=FORWARD)
class ZerosForRowsWithoutKeys(Plain):
    """Writes zeros over the NaN of rows without keys, which it knows by the mask."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hides = hidden(case, q.device)
        assert hides is not None
        out = attend(case, q, k, v, weights=partial(torch.softmax, dim=-1))
        return out.masked_fill(hides.all(-1, keepdim=True), 0.0)
