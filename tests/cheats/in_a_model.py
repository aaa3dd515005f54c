"""Backwards that are right in a benchmark and wrong in a model: by the gradient's strides, or by a changed output."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from attn_exp.backends.base import Calls, calls_of
from cheats.corpus import case_of, cheat, honest
from cheats.ways import Plain, Tensor

Step = Callable[[Tensor, Tensor], Tensor]


class _Attention(torch.autograd.Function):
    """Needs its output in the backward, for the sums of rows; `saves` says whether autograd knows of it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, saves: bool, read: Step) -> Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        lse = scores.logsumexp(-1, keepdim=True)
        out = torch.exp(scores - lse) @ v
        ctx.read, ctx.kept = read, None if saves else out.detach()
        ctx.save_for_backward(q, k, v, lse, *([out] if saves else []))
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        q, k, v, lse, *saved = ctx.saved_tensors
        out = saved[0] if saved else ctx.kept
        d_out, scale = ctx.read(d_out, out), q.shape[-1] ** -0.5
        p = torch.exp(q @ k.mT * scale - lse)
        ds = p * (d_out @ v.mT - (d_out * out).sum(-1, keepdim=True)) * scale
        return ds @ k, ds.mT @ q, p.mT @ d_out, None, None


def attention_with(q: Tensor, k: Tensor, v: Tensor, read: Step) -> Tensor:
    """Return an attention that saves its output, and reads the gradient of that in a way of its own."""
    made: Tensor = _Attention.apply(q, k, v, True, read)
    return made


def as_it_is(d_out: Tensor, out: Tensor) -> Tensor:
    """Return the output's gradient."""
    return d_out


def by_the_strides_of_the_output(d_out: Tensor, out: Tensor) -> Tensor:
    """Return what lies in the gradient's memory by the strides of the output."""
    return torch.as_strided(d_out, out.shape, out.stride())


def if_contiguous(d_out: Tensor, out: Tensor) -> Tensor:
    """Return the output's gradient."""
    if not d_out.is_contiguous():
        raise ValueError("the gradient has to be contiguous")
    return d_out


LONG = case_of(256)


@cheat(
    "gradients", "inaccurate", "wrong where the output's gradient lies in the other layout: d[qkv] is off", case=LONG
)
class StridesOfTheOutput(Plain):
    """Reads the output's gradient by the output's strides, as a kernel that is told only one set of them."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_with(q, k, v, by_the_strides_of_the_output)


@honest(case=LONG)
class OutputIsSaved(Plain):
    """Saves the output for its backward, which raises where a model has changed it."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_with(q, k, v, as_it_is)


@honest(case=LONG)
class RefusesOtherStrides(Plain):
    """Raises if the output's gradient is not contiguous."""

    def prepare(self, case: Any, inputs: Any) -> Calls:
        return calls_of(partial(self.attention, case), inputs)

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_with(q, k, v, if_contiguous)


class KeepsStrides(Plain):
    """Reads the output's gradient by the strides that the first one of these shapes had, as a plan that is kept."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.kept: dict[Any, tuple[int, ...]] = {}

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def by_the_first(d_out: Tensor, out: Tensor) -> Tensor:
            strides = self.kept.setdefault(out.shape, d_out.stride())
            # A block's may have gaps, and lie in more memory than another.
            reached = 1 + sum((size - 1) * stride for size, stride in zip(out.shape, strides, strict=True))
            lying = torch.as_strided(d_out, (d_out.untyped_storage().size() // d_out.element_size(),), (1,), 0)
            return torch.as_strided(torch.cat([lying, lying.new_zeros(reached)]), out.shape, strides)

        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
        return attention_with(q, k, v, by_the_first)


class _Saved(torch.autograd.Function):
    """Saves its inputs as autograd knows them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        ctx.save_for_backward(q, k, v, p)
        return p @ v

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        q, k, v, p = ctx.saved_tensors
        dp = d_out @ v.mT
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        return ds @ k, ds.mT @ q, p.mT @ d_out


class _Reads(Plain):
    read: Callable[[Tensor], Tensor]

    def prepare(self, case: Any, inputs: Any) -> Calls:
        read = type(self).read
        return calls_of(lambda *qkv: attention_with(*(read(one) for one in qkv), as_it_is), inputs)
