"""Inputs of a case: seeded, normally distributed, never zeros (zeros draw less power and run faster)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from attn_exp.attention.pages import Paging, as_cached, pages_of
from attn_exp.attention.scores import sinks_of
from attn_exp.core.case.case import GIVEN, INT8, NORMAL, Case

# The largest finite e4m3 number (arXiv:2209.05433, table 1).
E4M3_MAX = 448.0
# Tokens that packed sequences leave free at the end of their memory: what a tile of most kernels reads beyond.
_TOKENS_BEHIND = 128
_DISTRIBUTION = "normal(0, 1)"
_QUANTISED = "normal(0, 1) in float32, then e4m3 with one scale a tensor (amax / 448)"
# dq, dk and dv; for a block, the gradients of its inputs and weights.
Gradients = tuple[torch.Tensor, ...]
# Maps q, k and v, indexed (batch, heads, length, dim) in any layout, to the output with the same indices.
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# The same for any number of tensors.
Function = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Quantised:
    """Codes in `torch.float8_e4m3fn` and the scale that turns them into numbers."""

    codes: torch.Tensor
    scale: float

    def numbers(self) -> torch.Tensor:
        """Dequantise the codes into float32."""
        return self.codes.float() * self.scale


def quantised(numbers: torch.Tensor, scale: float | None = None) -> Quantised:
    """Round float32 numbers to codes; without a `scale` the largest number gets the largest code (amax / 448)."""
    if scale is None:
        # Any scale fits a tensor of zeros.
        scale = (numbers.abs().amax() / E4M3_MAX).item() or 1.0
    # PyTorch's versions differ in whether the cast saturates or returns NaN for numbers that are too large.
    return Quantised((numbers / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale)


def rounded(numbers: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """Return the numbers after quantising and dequantising."""
    return quantised(numbers, scale).numbers()


def unit_of(case: Case) -> float:
    """Return the distance from 1 to the next number of a case's dtype; of int8 codes, that of the largest to the next.

    A tensor's largest code is 127, so one of 128 is a unit, as in bfloat16.
    """
    return 2.0**-7 if case.dtype == INT8 else float(torch.finfo(getattr(torch, case.dtype)).eps)


@dataclass(frozen=True)
class Scales:
    """The factors of quantised inputs, one for each tensor."""

    q: float
    k: float
    v: float
    d_out: float


class DifferentiableInputs(Protocol):
    """The arguments of a function and the tensors that gradients are computed of: attention's, or a block's."""

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        """Return the function's arguments, in order."""
        ...

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that the backward computes gradients of: operands, and a block's weights."""
        ...

    @property
    def gradient_names(self) -> tuple[str, ...]:
        """Return the names of the leaves' gradients in records."""
        ...

    @property
    def d_out(self) -> torch.Tensor:
        """Return the gradient of the output."""
        ...


@dataclass(frozen=True)
class Inputs:
    """The tensors of a case, indexed (batch, heads, length, dim) and contiguous in the case's layout.

    q, k and v require gradients if and only if the backward is measured: saving for it changes the forward's work.

    Attributes:
        q_bhsd: (batch, q_heads, q_len, head_dim).
        k_bhsd: (batch, kv_heads, kv_len, head_dim).
        v_bhsd: (batch, kv_heads, kv_len, value_dim).
        d_out_bhsd: the output's gradient, (batch, q_heads, q_len, value_dim).
        scales: the factors of codes, None for other dtypes.
        kind: `normal`, a kind of hard values (attn_exp/attention/hard_values.py), or `given`.
        sink: the sinks of a case that has them, (1, q_heads, 1, 1), for backends; judges take them from the case.
        latent: whether the values are the first channels of the keys. `v_bhsd` is then that view of `k_bhsd`, whatever
            tensor of its shape was given, and requires no gradient.
        paging: the positions of keys and values if `k_bhsd` and `v_bhsd` are pools (pages, page_size, kv_heads, dim),
            as calls read them. None for tensors as above, which backends and judges are given.
    """

    q_bhsd: torch.Tensor
    k_bhsd: torch.Tensor
    v_bhsd: torch.Tensor
    d_out_bhsd: torch.Tensor
    scales: Scales | None = None
    kind: str = NORMAL
    sink: torch.Tensor | None = None
    latent: bool = False
    paging: Paging | None = None

    def __post_init__(self) -> None:
        if self.latent:
            values = self.k_bhsd.detach()[..., : self.v_bhsd.shape[-1]]
            object.__setattr__(self, "v_bhsd", values)

    def alias(self) -> "Inputs":
        """Return the same memory as leaves of their own, of which no graph knows the others; a sink is copied."""
        q, k, v, d_out = (
            tensor.data.requires_grad_(tensor.requires_grad)
            for tensor in (self.q_bhsd, self.k_bhsd, self.v_bhsd, self.d_out_bhsd)
        )
        sink = None if self.sink is None else self.sink.detach().clone().requires_grad_(self.sink.requires_grad)
        return replace(self, q_bhsd=q, k_bhsd=k, v_bhsd=v, d_out_bhsd=d_out, sink=sink)

    @property
    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v."""
        return self.q_bhsd, self.k_bhsd, self.v_bhsd

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        """Return q, k and v: attention has no other arguments."""
        return self.qkv

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        """Return q, k, v and the sinks, if there are any: they are the weights of an attention."""
        return self.qkv if self.sink is None else (*self.qkv, self.sink)

    @property
    def gradient_names(self) -> tuple[str, ...]:
        """Return the names of the gradients of q, k and v, and of the sinks."""
        return ("dq", "dk", "dv") if self.sink is None else ("dq", "dk", "dv", "d_sink")

    @property
    def d_out(self) -> torch.Tensor:
        """Return the output's gradient."""
        return self.d_out_bhsd

    def laid_out(self, layout: str) -> "Inputs":
        """Return the same numbers and indices, contiguous in `layout` (`bhsd` or `bshd`).

        Tensors are copied only if they have another layout; pools stay as they are. Copies are leaves of the graph, and
        gradients belong to them.
        """
        made = self.mapped(partial(_laid_out, layout=layout))
        # A pool has the layout of pages.
        return made if self.paging is None else replace(made, k_bhsd=self.k_bhsd, v_bhsd=self.v_bhsd)

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Inputs":
        """Return the same with each tensor changed."""
        q, k, v, d_out = map(change, (*self.qkv, self.d_out_bhsd))
        return replace(self, q_bhsd=q, k_bhsd=k, v_bhsd=v, d_out_bhsd=d_out)

    def row(self, row: int) -> "Inputs":
        """Return one row of the batch, as a batch of its own; copies that require no gradients."""
        return self.mapped(lambda tensor: tensor.detach()[row : row + 1].clone())

    def numbers(self) -> "Inputs":
        """Return the inputs as numbers: themselves, or dequantised in float32 without gradients."""
        if self.scales is None:
            return self
        scales = (self.scales.q, self.scales.k, self.scales.v, self.scales.d_out)
        tensors = zip((*self.qkv, self.d_out_bhsd), scales, strict=True)
        q, k, v, d_out = (Quantised(codes.detach(), scale).numbers() for codes, scale in tensors)
        return Inputs(q, k, v, d_out, kind=self.kind)


def distribution(case: Case, kind: str = NORMAL) -> str:
    """Describe the distribution of a case's inputs of a kind."""
    if kind == GIVEN:
        return "tensors that were given"
    if kind != NORMAL:
        return f"hard values: {kind}"
    cached = "" if case.cache_dtype is None else ", keys and values rounded to e4m3 codes"
    return _QUANTISED if case.in_codes else f"{_DISTRIBUTION}{cached}"


def make_inputs(case: Case, device: str, seed: int, *, with_gradients: bool) -> Inputs:
    """Return new inputs; the same seed, device model and shapes give the same numbers."""
    generator = torch.Generator(device).manual_seed(seed)
    # Codes are rounded from numbers that are drawn in float32.
    dtype: torch.dtype = torch.float32 if case.in_codes else getattr(torch, case.tensor_dtype)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    q = normal(case.batch, case.q_heads, case.q_len, case.head_dim)
    k = normal(case.batch, case.kv_heads, case.kv_len, case.head_dim)
    v = k[..., : case.value_dim] if case.latent else normal(case.batch, case.kv_heads, case.kv_len, case.value_dim)
    d_out = normal(case.batch, case.q_heads, case.q_len, case.value_dim)
    for of_keys in (k, v):
        as_cached(case, of_keys)
    sinks = sinks_of(case, q.device)
    made = Inputs(q, k, v, d_out, sink=sinks, latent=case.latent)
    if case.in_codes:
        of_q, of_k, of_v, of_d_out = map(quantised, (q, k, v, d_out))
        scales = Scales(of_q.scale, of_k.scale, of_v.scale, of_d_out.scale)
        made = Inputs(of_q.codes, of_k.codes, of_v.codes, of_d_out.codes, scales)
    for tensor in made.leaves:
        tensor.requires_grad_(with_gradients)
    return with_room(case, made.laid_out(case.layout))


def has_room(case: Case) -> bool:
    """Whether a case's tensors have memory behind them: packed tokens that lie behind each other."""
    return case.lengths is not None and case.layout == "bshd" and not case.in_codes and not case.latent


def with_room(case: Case, inputs: Inputs) -> Inputs:
    """Return packed tokens in memory that goes on behind the last one, as the buffers of a server do."""
    if not has_room(case):
        return inputs

    def roomy(tensor: torch.Tensor) -> torch.Tensor:
        _, heads, length, dim = tensor.shape
        buffer = torch.zeros((1, length + _TOKENS_BEHIND, heads, dim), dtype=tensor.dtype, device=tensor.device)
        tokens = buffer[:, :length].transpose(1, 2)
        return tokens.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)

    return inputs.mapped(roomy)


def paged(case: Case, inputs: Inputs) -> Inputs:
    """Return the same numbers with keys and values in new pools; the inputs themselves if the case has no pages."""
    if case.page_size is None:
        return inputs
    paging = Paging(case, pages_of(case, inputs.q_bhsd.device))
    k = paging.pool_of(inputs.k_bhsd)
    v = k[..., : case.value_dim] if case.latent else paging.pool_of(inputs.v_bhsd)
    return replace(inputs, k_bhsd=k, v_bhsd=v, paging=paging)


def sinks_in(case: Case, inputs: Inputs) -> torch.Tensor | None:
    """Return the sinks that a backend computes with: those of the inputs, or the case's where no gradient is asked."""
    return sinks_of(case, inputs.q_bhsd.device) if inputs.sink is None else inputs.sink


def _laid_out(tensor_bhsd: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "bhsd":
        lying = tensor_bhsd.detach().contiguous()
    else:
        lying = tensor_bhsd.detach().transpose(1, 2).contiguous().transpose(1, 2)
    # `contiguous` returns the tensor itself if it has that layout.
    return tensor_bhsd if lying.stride() == tensor_bhsd.stride() else lying.requires_grad_(tensor_bhsd.requires_grad)


def autograd_backward(inputs: DifferentiableInputs, out: torch.Tensor) -> Callable[[], Gradients]:
    """Return a call of `torch.autograd.grad` on an output; gradients do not accumulate, and a missing one is None."""
    return partial(torch.autograd.grad, out, inputs.leaves, inputs.d_out, retain_graph=True, allow_unused=True)


class Accumulator:
    """Adds gradients to those of earlier calls, as autograd does for leaves whose `.grad` is kept.

    A sum lies in memory as its leaf does, so that adding reads and writes the gradients as `AccumulateGrad` does: one
    elementwise kernel for each. The gradients of a call themselves stay what they are.
    """

    def __init__(self, inputs: DifferentiableInputs) -> None:
        self.sums = tuple(torch.zeros_like(leaf, requires_grad=False) for leaf in inputs.leaves)

    def backward(self, call: Callable[[], Gradients]) -> Callable[[], Gradients]:
        """Return a backward that also adds its gradients to the sums."""

        def accumulating() -> Gradients:
            gradients = call()
            with torch.no_grad():
                for kept, gradient in zip(self.sums, gradients, strict=True):
                    if gradient is not None:
                        kept.add_(gradient)
            return gradients

        return accumulating
