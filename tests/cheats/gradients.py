"""Backwards that do less than a backward, or do it when nobody times it."""

from typing import Any

import torch

from cheats.corpus import case_of, cheat
from cheats.ways import Plain, Run, Tensor, attend

ANY = r"\bd[qkv]\b|result of the first call"


@cheat("gradients", "inaccurate", ANY, seen="tensara#238")
class FirstGradientsForEver(Plain):
    """Returns the gradients of the first backward for ever."""

    kept: Any = None

    def backward(self, run: Run) -> Any:
        self.kept = self.kept or run()
        return self.kept


@cheat("gradients", "inaccurate", ANY)
class FirstGradientsOfEachOutput(Plain):
    """Computes gradients once for each forward, whatever the output's gradient is later."""

    def prepare(self, case: Any, inputs: Any) -> Any:
        from dataclasses import replace

        calls = super().prepare(case, inputs)

        def backward(out: Tensor) -> Run:
            kept: list[Any] = []
            run = calls.backward(out)

            def once() -> Any:
                if not kept:
                    kept.append(run())
                return kept[0]

            return once

        return replace(calls, backward=backward)


@cheat("gradients", "inaccurate", ANY)
class GradientsAfterThreeCalls(Plain):
    """Computes in its first three backwards, and returns the third's gradients from then on."""

    calls = 0

    def backward(self, run: Run) -> Any:
        self.calls += 1
        if self.calls <= 3:
            self.kept = run()
        return self.kept


@cheat("gradients", "inaccurate", r"\bdk\b")
class ZeroKeyGradient(Plain):
    """Returns zeros for dk."""

    def backward(self, run: Run) -> Any:
        dq, dk, dv = run()
        return dq, torch.zeros_like(dk), dv


@cheat("gradients", "inaccurate", ANY)
class ValueGradientAlone(Plain):
    """Computes dv and returns its inputs for the others."""

    def backward(self, run: Run) -> Any:
        _, _, dv = run()
        return self.inputs.q_bhsd.detach().clone(), self.inputs.k_bhsd.detach().clone(), dv


@cheat("gradients", "inaccurate", r"\bdk\b")
class KeyGradientKept(Plain):
    """Computes dq and dv anew, and returns the dk of the first backward."""

    kept: Tensor | None = None

    def backward(self, run: Run) -> Any:
        dq, dk, dv = run()
        self.kept = dk if self.kept is None else self.kept
        return dq, self.kept, dv


@cheat("gradients", "inaccurate", r"\bdq\b")
class HalfTheQueryGradient(Plain):
    """Computes dq for half of the batch and leaves the rest from the first call."""

    kept: Tensor | None = None

    def backward(self, run: Run) -> Any:
        dq, dk, dv = run()
        half = self.case.batch // 2
        if self.kept is None:
            self.kept = dq.clone()
        return torch.cat([dq[:half], self.kept[half:]]), dk, dv


@cheat("gradients", "inaccurate", r"\bdq\b")
class HalfTheQueryGradientZero(Plain):
    """Computes dq for the first half of the queries."""

    def backward(self, run: Run) -> Any:
        dq, dk, dv = run()
        dq = dq.clone()
        dq[:, :, self.case.q_len // 2 :] = 0
        return dq, dk, dv


@cheat("gradients", "inaccurate", r"\bdk\b", case=case_of(512, batch=1))
class OneRowOfKeyGradient(Plain):
    """Leaves one row of dk of one head out."""

    def backward(self, run: Run) -> Any:
        dq, dk, dv = run()
        dk = dk.clone()
        dk[0, 2, 300] = 0
        return dq, dk, dv


@cheat("gradients", "inaccurate", ANY, case=case_of(200))
class TailTileOfGradients(Plain):
    """Leaves out the last, incomplete tile of keys in dk and dv."""

    def backward(self, run: Run) -> Any:
        dq, *others = run()
        others = [one.clone() for one in others]
        for one in others:
            one[:, :, 192:] = 0
        return dq, *others


@cheat("gradients", "inaccurate", ANY)
class BackwardInTheForward(Plain):
    """Computes gradients in the forward, with the output's gradient that it was shown in `prepare`."""

    def forward(self, run: Run) -> Any:
        out = run()
        self.made = torch.autograd.grad(out, self.inputs.qkv, self.inputs.d_out, retain_graph=True)
        return out

    def backward(self, run: Run) -> Any:
        return self.made


@cheat("gradients", ("inaccurate", "error"), r"(?i)grad|without a graph")
class LaterForwardsWithoutGraph(Plain):
    """Saves nothing for a backward after its first forward, which makes forwards faster."""

    calls = 0

    def forward(self, run: Run) -> Any:
        self.calls += 1
        with torch.set_grad_enabled(self.calls == 1):
            return run()


@cheat("gradients", ("inaccurate", "error"), r"(?i)grad|without a graph")
class LaterForwardsWithoutGraphRedone(Plain):
    """Saves nothing for a backward after its first forward, and runs the forward again when a backward is asked for."""

    calls = 0

    def forward(self, run: Run) -> Any:
        self.calls += 1
        with torch.set_grad_enabled(self.calls == 1):
            return run()

    def prepare(self, case: Any, inputs: Any) -> Any:
        from dataclasses import replace

        calls = super().prepare(case, inputs)

        def backward(out: Tensor) -> Run:
            with torch.enable_grad():
                again = attend(case, *inputs.qkv)
            return calls.backward(again)

        return replace(calls, backward=backward)


@cheat("gradients", ("inaccurate", "error"), r"(?i)grad|without a graph")
class Detached(Plain):
    """Returns a detached output where gradients are asked for."""

    def forward(self, run: Run) -> Any:
        return run().detach()


def slow_weights(q: Tensor, k: Tensor) -> Tensor:
    """Return the softmax of the scores, computed several times in float64."""
    for _ in range(3):
        weights = torch.softmax(q.double() @ k.double().mT * q.shape[-1] ** -0.5, -1)
    return weights


class _KeepsWeights(torch.autograd.Function):
    """Saves nothing but the inputs; the weights are computed in the first backward of a graph, and stay with it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        ctx.save_for_backward(q, k, v, out)
        ctx.weights = None
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        q, k, v, out = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        if ctx.weights is None:
            # Slowly, so that the difference shows on a busy machine, too.
            ctx.weights = slow_weights(q, k).to(q.dtype)
        p = ctx.weights
        ds = ((d_out @ v.mT) - (d_out * out).sum(-1, keepdim=True)).mul_(p).mul_(scale)
        return ds @ k, ds.mT @ q, p.mT @ d_out


@cheat("gradients", "implausible", "the first backward of a forward (takes|runs)", case=case_of(512, batch=1))
class WeightsOfTheFirstBackward(Plain):
    """Computes the weights in the first backward of a forward, which nobody times, and keeps them for repeated ones."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _KeepsWeights.apply(q, k, v)


class _ForwardInTheFirstBackward(torch.autograd.Function):
    """Computes all gradients' factors anew in each backward, but only in the first one of a graph the forward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.graph = None
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        if ctx.graph is None:
            leaves = [one.detach().requires_grad_() for one in ctx.saved_tensors]
            with torch.enable_grad():
                ctx.graph = torch.nn.functional.scaled_dot_product_attention(*leaves), leaves
            slow_weights(*ctx.saved_tensors[:2])
        return torch.autograd.grad(*ctx.graph, d_out, retain_graph=True)


@cheat(
    "gradients", "implausible", "the first backward of a forward (takes|runs)", rival=True, case=case_of(512, batch=1)
)
class RecomputesOnce(Plain):
    """Recomputes the forward in the first backward of a forward alone, in a duel with an honest rival."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _ForwardInTheFirstBackward.apply(q, k, v)
