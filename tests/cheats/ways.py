"""What the backends of the corpus share: the formula with a hook at each step, and calls with a hook around each."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from attn_exp.attention.formula import hidden_keys
from attn_exp.attention.inputs import Inputs
from attn_exp.backends.base import Calls, calls_of
from attn_exp.core.case.case import Case

Tensor = torch.Tensor
Run = Callable[[], Any]
Step = Callable[[Tensor], Tensor]


def same(tensor: Tensor) -> Tensor:
    """Return the tensor."""
    return tensor


def softmax(scores: Tensor) -> Tensor:
    """Softmax over the keys; zeros for a query that sees none."""
    weights = torch.softmax(scores, dim=-1)
    return weights.masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0.0)


def grouped(case: Case, tensor: Tensor) -> Tensor:
    """Repeat key-value heads, so that there is one for each query head."""
    group = case.q_heads // case.kv_heads
    return tensor if group == 1 else tensor.repeat_interleave(group, dim=1)


def hidden(case: Case, device: torch.device) -> Tensor | None:
    """Return the mask (q_len, kv_len), True where a key is hidden; None if none is."""
    return hidden_keys(case, 0, case.q_len, device) if not case.dense else None


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: Tensor, backward: Step) -> Tensor:
        ctx.step = backward
        return one.view_as(one)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.step(grad), None


def passed(one: Tensor, backward: Step) -> Tensor:
    """Return a tensor as it is, whose gradient is that which a function makes of it."""
    made: Tensor = _Passed.apply(one, backward)
    return made


def attend(
    case: Case,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | str | None = "case",
    scale: float = 1.0,
    softcap: float | str | None = "case",
    tanh: Step = torch.tanh,
    scores: Step = same,
    fill: float = -torch.inf,
    weights: Step = softmax,
    p: Step = same,
) -> Tensor:
    """Return the formula in the tensors' dtype, with something else wherever an argument says so.

    Args:
        mask: True where a key is hidden, `case` for the case's own.
        scale: a factor of the scores besides 1 / sqrt(head_dim).
        softcap: another one than the case's.
        tanh: what the softcap uses.
        scores: applied to the scores before the mask.
        fill: the score of a hidden key.
        weights: the softmax.
        p: applied to the softmax's result.
    """
    k, v = grouped(case, k), grouped(case, v)
    s = q @ k.mT * (case.head_dim**-0.5 * scale)
    cap = case.softcap if softcap == "case" else softcap
    if cap is not None:
        s = cap * tanh(s / cap)
    s = scores(s)
    hides = hidden(case, q.device) if isinstance(mask, str) else mask
    if hides is not None:
        s = s.masked_fill(hides, fill)
    return p(weights(s)) @ v


class Plain:
    """The formula in the case's dtype; subclasses change `attention`, `forward`, `backward` or `prepared`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def unsupported(self, case: Case, device: str) -> str | None:
        """Refuse nothing."""
        return None

    def claimed_kernels(self, direction: str, device: str) -> str | None:
        """Claim nothing."""
        return None

    def attention(self, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute the output from q, k and v, differentiably."""
        return attend(case, q, k, v)

    def forward(self, run: Run) -> Any:
        """Do one forward call; `run` is the right one."""
        return run()

    def backward(self, run: Run) -> Any:
        """Do one backward call; `run` is the right one."""
        return run()

    def prepared(self, case: Case, inputs: Inputs) -> Inputs:
        """Do something in `prepare`, and return the inputs to use."""
        return inputs

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Return the calls with the hooks around them."""
        self.case, self.inputs = case, self.prepared(case, inputs)
        calls = calls_of(partial(self.attention, case), self.inputs)

        def backward(out: Tensor) -> Run:
            run = calls.backward(out)
            return lambda: self.backward(run)

        return replace(calls, forward=lambda: self.forward(calls.forward), backward=backward)


_CHANGED: list[tuple[Any, str, Any]] = []
_MISSING = object()


def patch(owner: Any, name: str, value: Any) -> Any:
    """Replace an attribute until `restore`, and return the old one."""
    old = owner.__dict__.get(name, _MISSING) if isinstance(owner, type) else getattr(owner, name, _MISSING)
    _CHANGED.append((owner, name, old))
    setattr(owner, name, value)
    return old


def later(undo: Run) -> None:
    """Let `restore` call this."""
    _CHANGED.append((undo, "", None))


def restore() -> None:
    """Undo what `patch` did, the newest first."""
    while _CHANGED:
        owner, name, old = _CHANGED.pop()
        if not name:
            owner()
        elif old is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, old)
