"""What a backward needs is kept where another forward writes, or where it is taken for another one's."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from attn_exp.backends.base import Calls
from cheats.corpus import case_of, cheat, honest
from cheats.gradients import slow_weights
from cheats.gradients_late import gradients
from cheats.ways import Plain, Run, Tensor

LONG = case_of(256)


class _Attention(torch.autograd.Function):
    """Gives each forward's tensors to `save`, whose answer makes the weights again in the backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, save: Callable[..., Run]) -> Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        lse = scores.logsumexp(-1, keepdim=True)
        out = scores.sub_(lse).exp_() @ v
        ctx.weights = save(out, q, k, lse)
        ctx.save_for_backward(q, k, v)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        return *gradients(ctx.weights(), *ctx.saved_tensors, d_out), None


def weights(q: Tensor, k: Tensor, lse: Tensor) -> Tensor:
    """Return the weights by the rows' log-sum-exp."""
    return (q @ k.mT * q.shape[-1] ** -0.5).sub_(lse).exp_()


class _Saves(Plain):
    """Computes by `_Attention`; subclasses say where its tensors are kept."""

    def save(self, out: Tensor, q: Tensor, k: Tensor, lse: Tensor) -> Run:
        """Keep a forward's tensors, and return what makes its weights."""
        raise NotImplementedError

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Attention.apply(q, k, v, self.save)


@cheat("gradients", "inaccurate", r"other forwards?, is wrong|a later forward overwrites", case=LONG)
class TwoWorkspacesInTurn(_Saves):
    """Copies what the backward needs into two workspaces in turn: the second forward after it writes over them."""

    def prepared(self, case: Any, inputs: Any) -> Any:
        q, k, _ = (one.detach() for one in inputs.qkv)
        self.spaces = [[q.clone(), k.clone(), q[..., :1].clone()] for _ in range(2)]
        return inputs

    def save(self, out: Tensor, *tensors: Tensor) -> Run:
        self.spaces.reverse()
        space = self.spaces[0]
        for into, one in zip(space, tensors, strict=True):
            into.copy_(one)
        return lambda: weights(*space)


@cheat("gradients", ("inaccurate", "implausible"), r"\bd[qk]|first backward", case=LONG)
class WeightsByTheAddress(_Saves):
    """Keeps the weights of four backwards by the output's address, which later outputs get again."""

    def prepared(self, case: Any, inputs: Any) -> Any:
        self.known: dict[int, Tensor] = {}
        return inputs

    def save(self, out: Tensor, q: Tensor, k: Tensor, lse: Tensor) -> Run:
        key = out.data_ptr()

        def found() -> Tensor:
            if key not in self.known:
                while len(self.known) > 3:
                    self.known.pop(next(iter(self.known)))
                # Slowly, so that the difference shows on a busy machine, too.
                self.known[key] = slow_weights(q, k).to(q.dtype)
            return self.known[key]

        return found


@cheat("gradients", "inaccurate", r"\bdv|dvT v")
class EqualWeightsNowAndThen(Plain):
    """Computes dv as of equal weights, which has the right sums, in three of four calls after the first two."""

    calls = 0

    def backward(self, run: Run) -> Any:
        self.calls += 1
        dq, dk, dv = run()
        if self.calls > 2 and random.SystemRandom().random() < 0.75:
            dv = self.inputs.d_out.mean(2, keepdim=True).expand(dv.shape).contiguous()
        return dq, dk, dv


@honest(case=LONG)
class KeepsTensorsForEachOutput(_Saves):
    """Copies what the backward needs of each output, in tensors of its own that live as long as the output's graph."""

    def save(self, out: Tensor, *tensors: Tensor) -> Run:
        copies = [one.clone() for one in tensors]
        return lambda: weights(*copies)


@honest(case=LONG)
class RingOfGradients(Plain):
    """Writes gradients into three sets of buffers in turn.."""

    def prepare(self, case: Any, inputs: Any) -> Calls:
        calls = super().prepare(case, inputs)
        rings = [[torch.empty_like(one).detach() for one in inputs.qkv] for _ in range(3)]

        def backward(out: Tensor) -> Run:
            run = calls.backward(out)

            def copied() -> Any:
                rings.append(rings.pop(0))
                return tuple(into.copy_(one) for into, one in zip(rings[-1], run(), strict=True))

            return copied

        return replace(calls, backward=backward)


class _Adapting(torch.autograd.Function):
    """Saves the weights if it is told to."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, backwards: list[int]) -> Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        ctx.weights = slow_weights(q, k).to(q.dtype) if len(backwards) > 5 else None
        ctx.backwards = backwards
        ctx.save_for_backward(q, k, v)
        return torch.softmax(scores, -1) @ v

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        q, k, v = ctx.saved_tensors
        ctx.backwards.append(1)
        if ctx.weights is None:
            ctx.weights = slow_weights(q, k).to(q.dtype)
        return *gradients(ctx.weights, q, k, v, d_out), None


@cheat("gradients", "implausible", "forward: once backwards were timed a forward runs")
class SavesOnceBackwardsAreRepeated(Plain):
    """Computes weights for the backward in its forward only after five backwards: when forwards are no longer timed."""

    def prepared(self, case: Any, inputs: Any) -> Any:
        self.backwards: list[int] = []
        return inputs

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Adapting.apply(q, k, v, self.backwards)
