"""Attention inside a transformer block with random weights, compared with the same block in float32."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from attn_exp.attention.error import Tolerance
from attn_exp.attention.expected import Expected
from attn_exp.attention.formula import formula, hidden_keys
from attn_exp.attention.inputs import Attention, autograd_backward, make_inputs
from attn_exp.attention.reference import reference_attention
from attn_exp.attention.tolerance import PART_SCORES, bounds
from attn_exp.backends.base import NO_FUNCTION, Backend, Calls, calls_of
from attn_exp.backends.package import Refused
from attn_exp.core.case.case import HALVES, NORMAL, Case
from attn_exp.core.case.flops import flops
from attn_exp.core.record.record import Work

# Standard deviation of the scores. With flat scores attention averages over thousands of keys and nearly vanishes
# beside the MLP, so that a wrong attention would not show in the block's output.
_SCORES = 2.5
_OF_ONES = 0.1


@dataclass(frozen=True)
class BlockInputs:
    """A block with its weights and operands, and its output's gradient (batch, length, width)."""

    block: Any
    operands: tuple[torch.Tensor, ...]
    d_out: torch.Tensor

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        """Return the operands and all weights, in the order of `gradient_names`."""
        return (*self.operands, *self.block.parameters())

    @property
    def gradient_names(self) -> tuple[str, ...]:
        """Return the gradients' names: `dx`, and `d_wq_weight` for the weight `wq.weight`."""
        weights = [f"d_{name.replace('.', '_')}" for name, _ in self.block.named_parameters()]
        return (*(f"d{name}" for name in self.block.operand_names), *weights)

    def to(self, precision: torch.dtype) -> "BlockInputs":
        """Return a copy of the same numbers in another precision."""
        operands = (operand.detach().to(precision).requires_grad_(operand.requires_grad) for operand in self.operands)
        return BlockInputs(copy.deepcopy(self.block).to(precision), tuple(operands), self.d_out.to(precision))

    def first(self, tokens: int) -> "BlockInputs":
        """Return the first tokens of one row of the batch; the weights are shared."""

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            # A vector that modulates all tokens has no length dimension.
            part = tensor.detach()[:1, :tokens] if tensor.ndim == self.d_out.ndim else tensor.detach()[:1]
            return part.contiguous().requires_grad_(tensor.requires_grad)

        return BlockInputs(self.block, tuple(cut(operand) for operand in self.operands), cut(self.d_out))


class RotaryBlock(nn.Module):
    """A block whose attention has rotary positions, of tokens x (batch, length, width) and perhaps of a vector."""

    operand_names: tuple[str, ...] = ("x", "vec")
    rotary_base = 10_000.0

    def __init__(self, case: Case) -> None:
        super().__init__()
        assert case.mlp_dim is not None
        self.heads, self.head_dim, self.mlp_dim = case.q_heads, case.head_dim, case.mlp_dim
        self.width = case.q_heads * case.head_dim
        self.tables = torch.empty(0)

    def operand_shapes(self, case: Case) -> dict[str, tuple[int, ...]]:
        """Return the shapes of x, and of a vector that modulates all tokens."""
        return {"x": (case.batch, case.q_len, self.width), "vec": (case.batch, self.width)}

    def place(self, case: Case, device: torch.device) -> None:
        """Build the rotary tables, which are no weights."""
        self.tables = rotary_tables(case.q_len, self.head_dim, self.rotary_base, device)

    def attended(self, attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return the attention (batch, length, width) of q, k and v (batch, length, heads, dim)."""
        q, k = rotate(q, self.tables), rotate(k, self.tables)
        return attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2).flatten(2)


def rotary_tables(length: int, dim: int, base: float, device: torch.device) -> torch.Tensor:
    """Return cosines and sines, (2, length, 1, dim / 2) in float32, the same numbers for every precision."""
    frequencies = base ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float64) / dim)
    angles = torch.arange(length, device=device, dtype=torch.float64)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()]).float().unsqueeze(2)


def rotate(x_bshd: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Rotate each pair of dimensions by its position's angle, in at least float32; the result has x's dtype."""
    cos, sin = tables[:, : x_bshd.shape[1]]
    wide = torch.promote_types(x_bshd.dtype, torch.float32)
    even, odd = x_bshd.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return turned.flatten(-2).to(x_bshd.dtype)


class BlockWorkload:
    """A workload with a block; `kind` makes the block of a case."""

    def __init__(self, kind: Callable[[Case], Any]) -> None:
        self.kind = kind

    def make_inputs(
        self, case: Case, device: str, seed: int, *, with_gradients: bool, kind: str = NORMAL
    ) -> BlockInputs:
        """Return normally distributed operands and output gradient, and weights that keep each layer's scale.

        Raises ValueError if another kind than `normal` was asked for: it describes q, k and v, which the block
        computes.
        """
        if kind != NORMAL:
            raise ValueError(f"a block has no inputs of the kind {kind}")
        generator = torch.Generator(device).manual_seed(seed)
        dtype: torch.dtype = getattr(torch, case.dtype)
        block = self._built(case, torch.device(device))
        _fill(block, generator)
        block.requires_grad_(with_gradients)

        def normal(shape: tuple[int, ...]) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        shapes = block.operand_shapes(case)
        operands = tuple(normal(shapes[name]).requires_grad_(with_gradients) for name in block.operand_names)
        return BlockInputs(block, operands, normal(shapes["x"]))

    def expected(
        self, case: Case, inputs: BlockInputs, *, with_gradients: bool, tolerances: dict[str, Tolerance] | None = None
    ) -> Expected:
        """Return the block in float32 with the reference's attention, and tolerances measured on a part of it."""
        whole = _outcome(inputs.to(torch.float32), reference_attention(case), with_gradients=with_gradients)
        return Expected(whole, tolerances or _tolerances(case, inputs, with_gradients=with_gradients))

    def calls(self, backend: Backend, case: Case, inputs: BlockInputs) -> Calls:
        """Return the block with the backend's attention.

        The heads of a token are adjacent, as projections leave them. Raises Refused if the backend has no function of
        q, k and v.
        """
        like = inputs.operands[0]
        lying = case.alone
        # The backend prepares for the shapes and strides of its inputs; the sample is freed when this returns.
        sample = make_inputs(lying, like.device.type, 0, with_gradients=like.requires_grad)
        prepared = backend.prepare(lying, sample)
        attention, block = prepared.attention, inputs.block
        if attention is None:
            raise Refused(NO_FUNCTION)

        def function(*operands: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = block(attention, *operands)
            return made

        strides = self._strides(case)

        def alone(*qkv: torch.Tensor) -> torch.Tensor:
            # No leaves of the graph, as what the block's projections return.
            made: torch.Tensor = attention(*map(_lying, qkv, strides))
            return made

        return replace(calls_of(function, inputs, prepared.scope, prepared.notes), alone=alone)

    def _strides(self, case: Case) -> list[tuple[int, ...]]:
        """Return the strides of q, k and v as the block hands them to its attention: parts of wider tensors, say."""
        found: list[tuple[int, ...]] = []

        def attention(*qkv: torch.Tensor) -> torch.Tensor:
            found.extend(tensor.stride() for tensor in qkv)
            return _free_attention(*qkv)

        block, operands = self._on_meta(case)
        with torch.no_grad():
            block(attention, *operands)
        return found

    def work(self, case: Case) -> dict[str, Work]:
        """Return the work of each pass.

        PyTorch's FlopCounterMode counts linear layers on meta tensors; attention follows from its mask. Bytes are
        operands, weights and the output once. Backward also reads the output's gradient and writes all others, and a
        step does both.
        """
        # It imports Triton, which nothing else needs on a CPU.
        from torch.utils.flop_counter import FlopCounterMode

        block, operands = self._on_meta(case)
        leaves = [*operands, *block.parameters()]
        with FlopCounterMode(display=False) as forward:
            out = block(_free_attention, *operands)
        with FlopCounterMode(display=False) as backward:
            torch.autograd.grad(out, leaves, torch.empty_like(out))
        read, written = sum(leaf.nbytes for leaf in leaves), out.nbytes
        linear = {"forward": forward.get_total_flops(), "backward": backward.get_total_flops()}
        linear["step"] = sum(linear[half] for half in HALVES)
        moved = {"forward": read + written, "backward": 2 * read + written, "step": 2 * read + 2 * written}
        counted = {direction: flops(case, direction) for direction in linear}
        return {
            name: Work(flops=linear[name] + counted[name], attention_flops=counted[name], bytes=moved[name])
            for name in linear
        }

    def _on_meta(self, case: Case) -> tuple[Any, list[torch.Tensor]]:
        """Return the block and its operands without memory."""
        block, dtype = self._built(case, torch.device("meta")), getattr(torch, case.dtype)
        shapes = block.operand_shapes(case)
        empty = (torch.empty(shapes[name], dtype=dtype, device="meta") for name in block.operand_names)
        return block, [tensor.requires_grad_() for tensor in empty]

    def _built(self, case: Case, device: torch.device) -> Any:
        """Return the block with uninitialised weights: PyTorch's initialisation would only take time."""
        with torch.device("meta"):
            block: Any = self.kind(case)
        block = block.to(getattr(torch, case.dtype)).to_empty(device=device)
        block.place(case, device)
        return block


@torch.no_grad()
def _fill(block: Any, generator: torch.Generator) -> None:
    for name, weight in block.named_parameters():
        weight.normal_(generator=generator)
        if weight.ndim > 1:
            weight *= weight.shape[-1] ** -0.5
        else:
            weight *= _OF_ONES
            if name.endswith("norm.weight"):
                weight += 1.0
        if name in block.sharpened:
            weight *= _SCORES**0.5


def _lying(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with these strides, in the graph of another one: a view, or a copy where they differ."""
    if tensor.stride() == strides:
        return tensor.view_as(tensor)
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _free_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return a tensor with attention's shape and dependencies but no matrix product, for counting."""
    group = q.shape[1] // k.shape[1]
    return q + (k + v).repeat_interleave(group, dim=1)


def _outcome(inputs: BlockInputs, attention: Attention, *, with_gradients: bool) -> dict[str, torch.Tensor]:
    with torch.set_grad_enabled(with_gradients):
        out = inputs.block(attention, *inputs.operands)
    tensors = {"out": out.detach()}
    if with_gradients:
        tensors |= dict(zip(inputs.gradient_names, autograd_backward(inputs, out)(), strict=True))
    return tensors


def _tolerances(case: Case, inputs: BlockInputs, *, with_gradients: bool) -> dict[str, Tolerance]:
    """Return bounds from the block with the unfused formula in its own dtype, on as many tokens as fit.

    Gradients of vectors are sums over all tokens with few elements, which may come out exact by chance. They get the
    widest bounds.
    """
    tokens = min(case.q_len, max(1, int((PART_SCORES[inputs.d_out.device.type] / case.q_heads) ** 0.5)))
    part, on_part = replace(case, batch=1, q_len=tokens, kv_len=tokens), inputs.first(tokens)
    mask = hidden_keys(part, 0, tokens, inputs.d_out.device) if not part.dense else None
    outcome = partial(_outcome, with_gradients=with_gradients)
    rounded = outcome(on_part, partial(formula, part, mask))
    single = outcome(on_part.to(torch.float32), reference_attention(part))
    exact = outcome(on_part.to(torch.float64), reference_attention(part))
    bounds_by_name = {name: bounds(case, rounded[name], single[name], exact[name]) for name in exact}
    widest = Tolerance(
        max(one.relative for one in bounds_by_name.values()), max(one.worst_row for one in bounds_by_name.values())
    )
    return {name: widest if exact[name].ndim == 1 else bounds_by_name[name] for name in exact}
