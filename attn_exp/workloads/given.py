"""The workload of a function and tensors of the user's own: nothing is drawn, and the reference may be theirs, too."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from attn_exp.attention.error import Tolerance, tensor_error
from attn_exp.attention.expected import Expected
from attn_exp.attention.formula import formula, hidden_keys
from attn_exp.attention.inputs import Function, Inputs, autograd_backward
from attn_exp.attention.reference import reference_attention
from attn_exp.attention.tolerance import FACTOR, ROUNDOFF, WORST_ROW_FACTOR, bounds
from attn_exp.backends.base import Backend, Calls, calls_of
from attn_exp.core.case.case import GIVEN, NORMAL, PASSES, Case
from attn_exp.core.record.record import Work
from attn_exp.workloads.base import AttentionAlone

# Maps a precision to the function that computes in it.
Reference = Callable[[torch.dtype], Function]


class GivenFunction:
    """A backend that is a function of q, k and v; autograd computes its backward."""

    def __init__(self, name: str, function: Function) -> None:
        self.name, self._function = name, function

    def unsupported(self, case: Case, device: str) -> str | None:
        """Return None: the function was given for this case."""
        return None

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Return the calls of the function."""
        return calls_of(self._function, inputs)

    def claimed_kernels(self, direction: str, device: str) -> str | None:
        """Return None: nothing is known of its kernels."""
        return None


class GivenTensors(AttentionAlone):
    """Attention of tensors that the user gave, as scaled_dot_product_attention defines it.

    `given` has q, k, v and the output's gradient; they are copied and never changed.
    """

    def __init__(self, given: Inputs) -> None:
        self.given = given

    def make_inputs(self, case: Case, device: str, seed: int, *, with_gradients: bool, kind: str = NORMAL) -> Inputs:
        """Return copies of the tensors with their strides."""
        q, k, v, d_out = (copied(tensor) for tensor in (*self.given.qkv, self.given.d_out))
        for tensor in (q, k, v):
            tensor.requires_grad_(with_gradients)
        return Inputs(q, k, v, d_out, kind=GIVEN)


@dataclass(frozen=True)
class Operands:
    """q, k and v, of which nothing is known but what a reference of the user's own computes, and the gradient."""

    operands: tuple[torch.Tensor, ...]
    d_out: torch.Tensor

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        """Return q, k and v."""
        return self.operands

    @property
    def gradient_names(self) -> tuple[str, ...]:
        """Return the names of the gradients of q, k and v."""
        return ("dq", "dk", "dv")

    def to(self, precision: torch.dtype) -> "Operands":
        """Return a copy of the same numbers in another precision."""
        q, k, v = (
            operand.detach().to(precision, copy=True).requires_grad_(operand.requires_grad) for operand in self.operands
        )
        return Operands((q, k, v), self.d_out.to(precision))


class GivenReference:
    """Tensors that the user gave, compared with a reference of their own; `counted` is whether the case has its work.

    Tolerances are those of the reference in the tensors' own dtype, as for other jobs those of the formula are. Raises
    ValueError if the reference's result is not finite, or has another shape than the output's gradient.
    """

    def __init__(self, case: Case, given: Inputs, reference: Reference, *, with_gradients: bool, counted: bool) -> None:
        self._given, self._reference, self._counted = given, reference, counted
        own = self.make_inputs(case, given.d_out.device.type, 0, with_gradients=with_gradients)
        rounded, single, exact = (
            self._outcome(own, precision, with_gradients=with_gradients)
            for precision in (given.d_out.dtype, torch.float32, torch.float64)
        )
        nudged = self._outcome(_nudged(own), torch.float64, with_gradients=with_gradients)
        plain = {name: bounds(case, rounded[name], single[name], exact[name]) for name in exact}
        self._tolerances = {name: _with_condition(plain[name], nudged[name], exact[name], case) for name in exact}

    def make_inputs(self, case: Case, device: str, seed: int, *, with_gradients: bool, kind: str = NORMAL) -> Operands:
        """Return copies of the tensors with their strides."""
        q, k, v = (copied(tensor).requires_grad_(with_gradients) for tensor in self._given.qkv)
        return Operands((q, k, v), copied(self._given.d_out))

    def expected(
        self, case: Case, inputs: Operands, *, with_gradients: bool, tolerances: dict[str, Tolerance] | None = None
    ) -> Expected:
        """Return the reference's results in float32."""
        return Expected(self._outcome(inputs, torch.float32, with_gradients=with_gradients), self._tolerances)

    def calls(self, backend: Backend, case: Case, inputs: Operands) -> Calls:
        """Return the calls of the backend's function."""
        q, k, v = inputs.operands
        return replace(backend.prepare(case, Inputs(q, k, v, inputs.d_out)), inputs=inputs)

    def work(self, case: Case) -> dict[str, Work]:
        """Return nothing where the case says it, else that only the tensors' bytes are known."""
        if self._counted:
            return {}
        read, out = sum(one.nbytes for one in self._given.qkv), self._given.d_out.nbytes
        moved = {"forward": read + out, "backward": 2 * read + out, "step": 2 * read + 2 * out}
        return {name: Work(flops=0, attention_flops=0, bytes=moved[name]) for name in PASSES}

    def _outcome(self, inputs: Operands, precision: torch.dtype, *, with_gradients: bool) -> dict[str, torch.Tensor]:
        computing = inputs.to(precision)
        with torch.set_grad_enabled(with_gradients):
            out = self._reference(precision)(*computing.operands)
        if not isinstance(out, torch.Tensor) or out.shape != inputs.d_out.shape:
            found = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
            raise ValueError(f"the result is {found}, not a tensor of shape {tuple(inputs.d_out.shape)}")
        out = out.to(precision)
        tensors = {"out": out.detach()}
        if with_gradients:
            tensors |= dict(zip(inputs.gradient_names, autograd_backward(computing, out)(), strict=True))
        return tensors


def _nudged(inputs: Operands) -> Operands:
    """Return the inputs in float64, each number changed by up to one roundoff of float32."""
    generator = torch.Generator(inputs.d_out.device).manual_seed(0)
    precise = inputs.to(torch.float64)
    with torch.no_grad():
        for tensor in precise.operands:
            noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64, device=tensor.device)
            tensor.mul_(1 + (2 * noise - 1) * ROUNDOFF)
    return precise


def _with_condition(bound: Tolerance, nudged: torch.Tensor, exact: torch.Tensor, case: Case) -> Tolerance:
    """Return a bound with room for how a reference amplifies roundings: large scores are rounded by more.

    A score is a sum of head_dim products, each of which is rounded.
    """
    found = tensor_error(nudged, exact).relative or 0.0
    room = FACTOR * case.head_dim**0.5 * found
    return Tolerance(bound.relative + room, bound.worst_row + WORST_ROW_FACTOR / FACTOR * room)


def scaled(case: Case, scale: float) -> Reference:
    """Return the reference of a case whose scores are multiplied by `scale` in place of 1 / sqrt(head_dim)."""
    factor = scale * case.head_dim**0.5

    def of(precision: torch.dtype) -> Function:
        if precision in (torch.float32, torch.float64):
            exact = reference_attention(case)
            return lambda q, k, v: exact(q * factor, k, v)
        # The formula rounds after each operator.
        return lambda q, k, v: formula(case, hidden(q), q * factor, k, v)

    def hidden(q: torch.Tensor) -> torch.Tensor | None:
        return hidden_keys(case, 0, case.q_len, q.device) if not case.dense else None

    return of


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides; contiguous where elements share memory, as after `expand`."""
    plain = tensor.detach()
    shared = any(stride == 0 and size > 1 for stride, size in zip(plain.stride(), plain.shape, strict=True))
    if shared:
        return plain.contiguous()
    copy = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device=plain.device)
    return copy.copy_(plain)
