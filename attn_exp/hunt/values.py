"""The values of examples, and which part of one is judged.

Kinds of values are lines of Python, so that the script of a find repeats them as they are.
"""

from dataclasses import dataclass, replace
from itertools import starmap

import torch

from attn_exp.attention.inputs import Inputs, make_inputs
from attn_exp.core.case import Case
from attn_exp.core.hunting import Example

# What is done to q, k, v and d_out, which are normally distributed.
KINDS: dict[str, tuple[str, ...]] = {
    "normal": (),
}
# Large tensors repeat a block of this many numbers. It is prime, so that an offset that wraps around at a power of two
# reads other numbers.
PERIOD = 1_000_003
_OVERFLOW = 1 << 31
# Heads of a large example that are judged besides the first and the last.
_SOME = 1


@dataclass(frozen=True)
class Part:
    """What is judged of an example: a key-value head of one row of the batch with its queries, or everything.

    Attributes:
        case: the part as a case of its own.
        inputs: its tensors.
        whole: the shapes that the backend's tensors must have.
        place: row of the batch and key-value head; None for everything.
    """

    case: Case
    inputs: Inputs
    whole: dict[str, torch.Size]
    place: tuple[int, int] | None = None

    @property
    def where(self) -> str:
        """Return the part in words, for the end of a sentence."""
        return "" if self.place is None else f" (row {self.place[0]} of the batch, key-value head {self.place[1]})"

    def of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return this part of a backend's tensor, `out`, `dq`, `dk` or `dv`."""
        return tensor if self.place is None else _cut(tensor, self.place, tensor.shape[1] // self._kv_heads())

    def _kv_heads(self) -> int:
        return self.whole["dk"][1]


def inputs_of(example: Example, device: str) -> Inputs:
    """Return an example's tensors."""
    if example.large:
        return _repeated(example, device)
    return make_inputs(example.case, device, example.seed, with_gradients=example.backward)


def judged_parts(example: Example, inputs: Inputs) -> list[Part]:
    """Return what is judged: everything, or the first, the last and some other heads of a large example."""
    q, k, v = inputs.qkv
    whole = {"out": inputs.d_out_bhsd.shape, "dq": q.shape, "dk": k.shape, "dv": v.shape}
    if not example.large:
        return [Part(example.case, inputs, whole)]
    case = example.case
    heads = case.batch * case.kv_heads
    dice = torch.Generator().manual_seed(example.seed)
    chosen = sorted({0, heads - 1, *torch.randint(heads, (_SOME,), generator=dice).tolist()}, reverse=True)
    group = case.q_heads // case.kv_heads
    alone = replace(case, batch=1, q_heads=group, kv_heads=1)
    tensors = (inputs.q_bhsd, inputs.k_bhsd, inputs.v_bhsd, inputs.d_out_bhsd)

    def part(row: int, head: int) -> Part:
        q, k, v, d_out = (_cut(tensor.detach(), (row, head), tensor.shape[1] // case.kv_heads) for tensor in tensors)
        own = Inputs(q.contiguous(), k.contiguous(), v.contiguous(), d_out.contiguous())
        for tensor in own.qkv:
            tensor.requires_grad_(example.backward)
        return Part(alone, own, whole, (row, head))

    return list(starmap(part, (divmod(index, case.kv_heads) for index in chosen)))


def large_bytes(case: Case, *, backward: bool, itemsize: int) -> int:
    """Return about how many bytes a large example takes on its way through a backend and the reference."""
    q = case.batch * case.q_heads * case.q_len
    kv = case.batch * case.kv_heads * case.kv_len
    numbers = (q + kv) * (case.head_dim + case.value_dim)
    part = (case.kv_len + case.q_len * case.q_heads // case.kv_heads) * (case.head_dim + case.value_dim)
    return numbers * itemsize * (2 if backward else 1) + 40 * part * (1 + backward) + (1 << 29)


def overflows(case: Case) -> bool:
    """Whether a tensor of the case has offsets that no 32-bit integer holds."""
    return (
        max(
            case.batch * case.q_heads * case.q_len * max(case.head_dim, case.value_dim),
            case.batch * case.kv_heads * case.kv_len * max(case.head_dim, case.value_dim),
        )
        > _OVERFLOW
    )


def _repeated(example: Example, device: str) -> Inputs:
    """Return tensors that repeat a block of normally distributed numbers: 2^31 of their own take a minute on a CPU."""
    case, dtype = example.case, getattr(torch, example.case.dtype)
    generator = torch.Generator(device).manual_seed(example.seed)

    def tiled(heads: int, length: int, dim: int) -> torch.Tensor:
        block = torch.randn(PERIOD, generator=generator, device=device).to(dtype)
        shape = (case.batch, heads, length, dim) if case.layout == "bhsd" else (case.batch, length, heads, dim)
        count = case.batch * heads * length * dim
        tensor = block.repeat(-(-count // PERIOD))[:count].view(shape)
        return tensor if case.layout == "bhsd" else tensor.transpose(1, 2)

    q = tiled(case.q_heads, case.q_len, case.head_dim)
    k = tiled(case.kv_heads, case.kv_len, case.head_dim)
    v = tiled(case.kv_heads, case.kv_len, case.value_dim)
    d_out = tiled(case.q_heads, case.q_len, case.value_dim)
    for tensor in (q, k, v):
        tensor.requires_grad_(example.backward)
    return Inputs(q, k, v, d_out)


def _cut(tensor: torch.Tensor, place: tuple[int, int], heads: int) -> torch.Tensor:
    row, head = place
    return tensor[row : row + 1, head * heads : (head + 1) * heads]
