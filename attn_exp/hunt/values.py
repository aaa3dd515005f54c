"""The values of examples, how they lie in memory, and which part of an example is judged.

Offsets above 2^31 elements are cheap to have. In a *spread* example the steps of one tensor are so large that its last
element lies beyond; the memory between its elements is reserved and, on a CPU, never touched. Of two parts the step
itself has more than 32 bits; of more parts only the product of step and index has (pytorch#190857: Triton takes a step
of more than 32 bits as 64, and multiplies others in 32). That misses kernels that copy their inputs or compute offsets
of contiguous tensors. A *whole* example has that many elements: those of the heads that are judged are drawn, and the
others are zeros.
"""

from dataclasses import dataclass, replace

import torch

from attn_exp.attention.hard_values import make_inputs_of
from attn_exp.attention.inputs import Inputs
from attn_exp.core.case import DTYPE_BYTES, Case
from attn_exp.core.hunting import Example

# Elements that a 32-bit offset reaches.
REACH = 1 << 31
# No power of two, so that an offset that wraps around hits other memory.
_ODD = 1_048_583


@dataclass(frozen=True)
class Part:
    """What is judged of an example: a key-value head of one row of the batch with its queries, or everything.

    Attributes:
        case: the part as a case of its own.
        inputs: its tensors.
        place: row of the batch and key-value head; None for everything.
    """

    case: Case
    inputs: Inputs
    place: tuple[int, int] | None = None

    @property
    def where(self) -> str:
        """Return the part in words, for the end of a sentence."""
        return "" if self.place is None else f" (row {self.place[0]} of the batch, head {self.place[1]})"

    def of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return this part of a backend's tensor `out`, `dq`, `dk` or `dv`."""
        return tensor if self.place is None else cut(tensor, self.place)


def inputs_of(example: Example, device: str) -> Inputs:
    """Return an example's tensors."""
    if example.large == "whole":
        return _whole(example, device)
    inputs = make_inputs_of(example.inputs, example.case, device, example.seed, with_gradients=example.backward)
    return inputs if example.large is None else _spread(example.large, inputs)


def places_of(case: Case) -> list[tuple[int, int]]:
    """Return the rows of the batch and the heads of a whole example that are drawn and judged: the last first."""
    return sorted({(case.batch - 1, case.kv_heads - 1), (0, case.kv_heads // 2), (0, 0)}, reverse=True)


def judged_parts(example: Example, inputs: Inputs) -> list[Part]:
    """Return what is judged: everything, or some heads of a whole large example."""
    if example.large != "whole":
        return [Part(example.case, inputs)]
    alone = replace(example.case, batch=1, q_heads=1, kv_heads=1)
    return [Part(alone, _one(inputs, place, backward=example.backward), place) for place in places_of(example.case)]


def whole_bytes(case: Case, *, backward: bool) -> int:
    """Return about how many bytes a whole large example takes in a backend and in the reference."""
    q = case.batch * case.q_heads * case.q_len
    kv = case.batch * case.kv_heads * case.kv_len
    head = (case.q_len + case.kv_len) * (case.head_dim + case.value_dim)
    return (q + kv) * (case.head_dim + case.value_dim) * DTYPE_BYTES[case.dtype] * (1 + backward) + 60 * head


def cut(tensor: torch.Tensor, place: tuple[int, int]) -> torch.Tensor:
    """Return one head of one row of the batch, (1, 1, length, dim)."""
    row, head = place
    return tensor[row : row + 1, head : head + 1]


def _one(inputs: Inputs, place: tuple[int, int], *, backward: bool) -> Inputs:
    tensors = (*inputs.qkv, inputs.d_out_bhsd)
    q, k, v, d_out = (cut(tensor.detach(), place).contiguous() for tensor in tensors)
    for tensor in (q, k, v):
        tensor.requires_grad_(backward)
    return Inputs(q, k, v, d_out)


def _whole(example: Example, device: str) -> Inputs:
    case, dtype = example.case, getattr(torch, example.case.tensor_dtype)
    generator = torch.Generator(device).manual_seed(example.seed)

    def sparse(heads: int, length: int, dim: int) -> torch.Tensor:
        shape = (case.batch, heads, length, dim) if case.layout == "bhsd" else (case.batch, length, heads, dim)
        tensor = torch.zeros(shape, dtype=dtype, device=device)
        tensor = tensor if case.layout == "bhsd" else tensor.transpose(1, 2)
        for row, head in places_of(case):
            tensor[row, head] = torch.randn(length, dim, generator=generator, dtype=dtype, device=device)
        return tensor

    q = sparse(case.q_heads, case.q_len, case.head_dim)
    k = sparse(case.kv_heads, case.kv_len, case.head_dim)
    v = sparse(case.kv_heads, case.kv_len, case.value_dim)
    d_out = sparse(case.q_heads, case.q_len, case.value_dim)
    for tensor in (q, k, v):
        tensor.requires_grad_(example.backward)
    return Inputs(q, k, v, d_out)


def _spread(which: str, inputs: Inputs) -> Inputs:
    """Return the inputs with the parts of one tensor, `q`, `k` or `v`, far from each other."""
    tensors = dict(zip("qkv", inputs.qkv, strict=True))
    tensors[which] = spread(tensors[which])
    return replace(inputs, q_bhsd=tensors["q"], k_bhsd=tensors["k"], v_bhsd=tensors["v"])


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy whose first dimension of several elements has its last one beyond 2^31 elements."""
    axis = spread_axis(tensor.shape)
    step = step_of(tensor.shape[axis])
    strides = list(tensor.stride())
    strides[axis] = step
    room = torch.empty((tensor.shape[axis] - 1) * step + tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    far = room.as_strided(tensor.shape, strides)
    far.copy_(tensor.detach())
    return far.requires_grad_(tensor.requires_grad)


def step_of(parts: int) -> int:
    """Return the step between the parts of a spread tensor."""
    return REACH // (parts - 1) + _ODD


def spread_axis(shape: tuple[int, ...]) -> int:
    """Return the dimension that is spread: the batch if it has several rows, else the heads, else the tokens."""
    return next(axis for axis, size in enumerate(shape[:3]) if size > 1)
