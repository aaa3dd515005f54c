"""Backwards whose gradients are wrong at once."""

from typing import Any

import torch

from cheats.corpus import BOTH, FORWARD, case_of, cheat
from cheats.ways import Plain, Run, Tensor, attend, softmax

ANY = r"\bd[qkv]\b"


@cheat("gradients", "inaccurate", ANY)
class SwappedGradients(Plain):
    """Returns dk as dq and dq as dk."""

    def backward(self, run: Run) -> Any:
        dq, dk, dv = run()
        return dk, dq, dv


@cheat("gradients", "inaccurate", ANY)
class GradientOfTheFirstOutput(Plain):
    """Differentiates the first output for ever, with a copy of the inputs of that time."""

    first: Any = None

    def backward(self, run: Run) -> Any:
        if self.first is None:
            copies = [one.detach().clone().requires_grad_() for one in self.inputs.qkv]
            self.first = attend(self.case, *copies), copies
        out, copies = self.first
        return torch.autograd.grad(out, copies, self.inputs.d_out, retain_graph=True)


@cheat("gradients", "inaccurate", ANY)
class OfOnes(Plain):
    """Differentiates the sum of the output, as if its gradient were ones."""

    def prepare(self, case: Any, inputs: Any) -> Any:
        from dataclasses import replace

        calls = super().prepare(case, inputs)

        def backward(out: Tensor) -> Run:
            return lambda: torch.autograd.grad(out, inputs.qkv, torch.ones_like(out), retain_graph=True)

        return replace(calls, backward=backward)


@cheat("gradients", "inaccurate", ANY)
class NoRowSums(Plain):
    """Leaves out the term of the row sums (delta) in the softmax's gradient."""

    def backward(self, run: Run) -> Any:
        q, k, v = self.inputs.qkv
        d_out, scale = self.inputs.d_out, self.case.head_dim**-0.5
        with torch.no_grad():
            p = softmax(q @ k.mT * scale)
            ds = p * (d_out @ v.mT) * scale
            return ds @ k, ds.mT @ q, p.mT @ d_out


@cheat("gradients", "inaccurate", ANY, case=case_of(256, dtype="bfloat16", causal=True))
class AccumulatedGradients(Plain):
    """Adds each call's dq to that of the calls before, as atomics into a buffer that nobody clears."""

    total: Tensor | None = None

    def backward(self, run: Run) -> Any:
        dq, dk, dv = run()
        self.total = dq.clone() if self.total is None else self.total + dq
        return self.total, dk, dv


@cheat("gradients", "inaccurate", r"gradient|backward", passes=BOTH)
class TwoGradients(Plain):
    """Forgets dv."""

    def backward(self, run: Run) -> Any:
        return run()[:2]


@cheat("gradients", "inaccurate", ANY, passes=BOTH)
class NoneAsGradient(Plain):
    """Returns None for dk."""

    def backward(self, run: Run) -> Any:
        dq, _, dv = run()
        return dq, None, dv


@cheat("gradients", "inaccurate", ANY)
class GradientsExpanded(Plain):
    """Returns the mean of dk over the keys, expanded with a stride of zero."""

    def backward(self, run: Run) -> Any:
        dq, dk, dv = run()
        return dq, dk.mean(2, keepdim=True).expand_as(dk), dv


@cheat("gradients", "inaccurate", r"\bout\b", passes=FORWARD)
class NoGradientsAndNoForward(Plain):
    """Returns q as the output where no gradients are asked for."""

    def forward(self, run: Run) -> Any:
        return self.inputs.q_bhsd.clone()


@cheat("gradients", "inaccurate", r"\bd[kv]\b", passes=BOTH, case=case_of(kv_heads=2))
class GroupNotSummed(Plain):
    """Returns dk and dv of one query head of each group, without the others."""

    def backward(self, run: Run) -> Any:
        q, k, v = self.inputs.qkv
        group = self.case.q_heads // self.case.kv_heads
        wide_k, wide_v = (one.detach().repeat_interleave(group, 1).requires_grad_() for one in (k, v))
        scores = q @ wide_k.mT * self.case.head_dim**-0.5
        dq, dk, dv = torch.autograd.grad(softmax(scores) @ wide_v, (q, wide_k, wide_v), self.inputs.d_out)
        return dq, dk[:, ::group], dv[:, ::group]


class _SharedStatistics(torch.autograd.Function):
    """Keeps the rows' log-sum-exp and the output in one workspace that all calls of a shape share."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, workspace: dict[str, Tensor]) -> Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        workspace["lse"] = scores.logsumexp(-1, keepdim=True)
        workspace["out"] = (scores - workspace["lse"]).exp() @ v
        ctx.save_for_backward(q, k, v)
        ctx.workspace = workspace
        return workspace["out"].clone()

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        q, k, v = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        p = (q @ k.mT * scale - ctx.workspace["lse"]).exp()
        ds = p * (d_out @ v.mT - (d_out * ctx.workspace["out"]).sum(-1, keepdim=True)) * scale
        return ds @ k, ds.mT @ q, p.mT @ d_out, None


@cheat("gradients", "inaccurate", r"a later forward overwrites what the backward .* needs: d[qkv] ")
class SharedStatistics(Plain):
    """Keeps what the backward needs where the next forward writes: wrong for two layers, or two micro-batches."""

    def prepared(self, case: Any, inputs: Any) -> Any:
        self.workspace: dict[str, Tensor] = {}
        return inputs

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _SharedStatistics.apply(q, k, v, self.workspace)
