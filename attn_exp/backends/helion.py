"""This package's attention in Helion, PyTorch's kernel language that compiles to Triton."""

from typing import Any

import torch

from attn_exp.attention.inputs import Inputs
from attn_exp.backends.base import Calls, DeclarativeBackend, calls_of
from attn_exp.backends.package import Package, WrongOption
from attn_exp.backends.supports import Supports
from attn_exp.core.case.case import Case

AUTOTUNE = ("none", "quick", "full")


class Helion(DeclarativeBackend):
    """Our own fused attention in Helion, forward and backward, without atomics.

    Run on an H200 with Helion 1.0.0, which fits torch 2.11; Helion 1.5 requires a newer torch. `autotune=none` uses
    tiles that were measured there. `quick` and `full` let Helion search tiles for the case at the first call, which
    takes minutes; the authors have not run that search.
    """

    supports = Supports(
        masks=("window",),
        features=("softcap",),
        largest_head_dim=256,
        head_dim_multiple=16,
        value_dims="any",
        capability=(8, 0),
    )
    generates_triton = True
    package = Package("helion", "helion", 'pip install "helion>=1.0,<1.1"')
    claims = {("cuda", "forward"): r"_helion_attention_forward", ("cuda", "backward"): r"_helion_attention_(dk_dv|dq)"}

    def __init__(self, name: str, autotune: str = "none") -> None:
        super().__init__(name)
        if autotune not in AUTOTUNE:
            raise WrongOption(f"autotune={autotune!r} is not one of {', '.join(AUTOTUNE)}")
        self.autotune = autotune

    def unsupported(self, case: Case, device: str) -> str | None:
        """Also refuse dimensions of size 1, which Helion 1.0 computes incorrectly."""
        if 1 in (case.q_len, case.kv_len):
            return f"{self.name} needs at least 2 queries and 2 keys, not {case.q_len} and {case.kv_len}"
        return super().unsupported(case, device)

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Return the calls; kernels are compiled at the first call of each pass."""
        self.package.load()
        from attn_exp.kernels import helion_attention

        problem = helion_attention.Problem(
            group=case.q_heads // case.kv_heads,
            scale=case.head_dim**-0.5,
            causal=case.causal,
            offset=case.offset,
            window=case.window,
            softcap=case.softcap,
        )
        kernels = helion_attention.compiled(max(case.head_dim, case.value_dim), self.autotune)

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = _Attention.apply(q, k, v, kernels, problem)  # type: ignore[no-untyped-call]
            return out

        return calls_of(attention, inputs.laid_out("bhsd"))


class _Attention(torch.autograd.Function):
    """The kernels with their backward; tensors are (batch, heads, length, dim)."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernels: Any, problem: Any
    ) -> torch.Tensor:
        """Return the output; save queries, keys, values, output and log-sum-exp for the backward."""
        ctx.kernels, ctx.problem = kernels, problem
        flat = [tensor.flatten(0, 1) for tensor in (q, k, v)]
        out, lse = kernels.forward(*flat, *problem.constants)
        ctx.save_for_backward(*flat, out, lse)
        ctx.shapes = q.shape, k.shape, v.shape
        output: torch.Tensor = out.view(*q.shape[:-1], v.shape[-1])
        return output

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Compute the row sums first, which both gradient kernels need."""
        q, k, v, out, lse = ctx.saved_tensors
        d_out = d_out.contiguous().flatten(0, 1)
        row_sums = ctx.kernels.row_sums(out, d_out)
        dk, dv = ctx.kernels.dk_dv(q, k, v, d_out, lse, row_sums, *ctx.problem.constants)
        dq = ctx.kernels.dq(q, k, v, d_out, lse, row_sums, *ctx.problem.constants)
        gradients = (gradient.view(shape) for gradient, shape in zip((dq, dk, dv), ctx.shapes, strict=True))
        return (*gradients, None, None)
