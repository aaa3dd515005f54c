"""New inputs for every timed call: signs of channels change in place, so that no earlier result is right.

A change is one or two kernels a tensor, allocates nothing, keeps the distribution (a normal one is symmetric), and is
exact: changing the same signs again restores the numbers. A forward gets other channels of q, other rows and channels
of k or v, of some or all of them; a backward gets other rows and channels of the output's gradient, so that dq, dk and
dv all change. Changing the same channels of q and k changes no score, and changing channels of v changes those of the
output: such a *relative* of inputs shares their reference.
"""

import contextlib
import random
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from attn_exp.attention.bits import bits_of
from attn_exp.attention.inputs import DifferentiableInputs, Inputs
from attn_exp.attention.sampling import fresh_dice
from attn_exp.core.case import NORMAL

# Drawn once: drawing signs on the device would take a kernel for each call. Rows are many, and few patterns combine to
# many states.
_PATTERNS, _PATTERNS_OF_ROWS = 64, 16

# What is changed of each tensor as the bits of a number: by the tensor's name bit c stands for channel c, by `rows_of`
# its name bit r for row r.
Signs = Mapping[str, int]


def rows_of(name: str) -> str:
    """Return the key of a tensor's rows in `Signs`."""
    return f"rows of {name}"


def flip_signs(tensor: torch.Tensor, bits: int, dim: int = -1) -> None:
    """Change in place the signs where bits are set: of channels, or of what else lies along `dim`, -1 or -2."""
    if bits:
        integers = bits_of(tensor)
        integers.bitwise_xor_(_along(_masks([bits], integers, dim)[0], dim))


def flip_rows(tensor: torch.Tensor, bits: Sequence[int]) -> None:
    """Change in place the signs of channels of each row of the batch where its bits are set."""
    integers = bits_of(tensor)
    integers.bitwise_xor_(_masks(bits, integers, -1)[:, None, None])


def every_channel(tensor: torch.Tensor) -> int:
    """Return the bits of all channels: flipping these negates a tensor."""
    return (1 << tensor.shape[-1]) - 1


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor lies, and the bytes of the memory that it lies in."""
    return tensor.data_ptr(), tensor.untyped_storage().nbytes()


def sign_factors(several: Sequence[int], length: int, device: torch.device) -> torch.Tensor:
    """Return -1 where bits are set, else 1, in float32: (numbers, `length`)."""
    return _chosen(several, length, struct.pack("f", 1.0), struct.pack("f", -1.0), torch.float32).to(device)


def _masks(several: Sequence[int], integers: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the sign bit where bits are set, else 0, in the integers' dtype: (numbers, length of `dim`)."""
    size = integers.element_size()
    sign = (1 << 8 * size - 1).to_bytes(size, sys.byteorder)
    return _chosen(several, integers.shape[dim], bytes(size), sign, integers.dtype).to(integers.device)


def _chosen(several: Sequence[int], length: int, clear: bytes, is_set: bytes, dtype: torch.dtype) -> torch.Tensor:
    """Return one of two elements for each bit of numbers, (numbers, `length`) on the CPU.

    Few operators: this is done often, between calls that are timed.
    """
    digits = "".join(f"{bits:0{length}b}"[::-1] for bits in several).encode()
    # No byte of an element is a digit.
    elements = digits.replace(b"0", clear).replace(b"1", is_set)
    return torch.frombuffer(bytearray(elements), dtype=dtype).view(len(several), length)


def _along(mask: torch.Tensor, dim: int) -> torch.Tensor:
    return mask if dim == -1 else mask[:, None]


class _Changeable:
    """A tensor as integers, with masks of sign bits along one dimension that a kernel applies."""

    def __init__(self, tensor: torch.Tensor, dice: random.Random, dim: int = -1, bits: Sequence[int] = ()) -> None:
        self.length = tensor.shape[dim]
        self._integers = bits_of(tensor)
        count = _PATTERNS if dim == -1 else _PATTERNS_OF_ROWS
        self.bits = bits or [dice.getrandbits(self.length) or 1 for _ in range(count)]
        # Made now: a copy to a GPU between timed calls would make the host wait for it.
        self._masks = [_along(mask, dim) for mask in _masks(self.bits, self._integers, dim)]
        self._factors = sign_factors(self.bits, self.length, tensor.device).unbind()
        self.signs = torch.ones(self.length, device=tensor.device)

    def change(self, pattern: int) -> int:
        self._integers.bitwise_xor_(self._masks[pattern])
        self.signs.mul_(self._factors[pattern])
        return self.bits[pattern]


@dataclass(frozen=True)
class State:
    """How inputs differ from those of the seed: by signs of channels and rows, and whether the gradient is negated."""

    signs: Signs
    negated: bool = False


def apply_signs(tensor: torch.Tensor, state: State, name: str) -> None:
    """Change a tensor of the inputs of the seed, `q`, `k`, `v`, `d_out` or a block's, into that of a state."""
    flip_signs(tensor, state.signs[name])
    flip_signs(tensor, state.signs.get(rows_of(name), 0), dim=-2)
    if name == "d_out" and state.negated:
        flip_signs(tensor, every_channel(tensor))


class FreshInputs:
    """Changes the tensors that a backend's calls read, and knows how they differ from the inputs of the seed.

    Args:
        read: what the calls read: attention's inputs in the backend's layout, or a block's. The last dimension is that
            of the channels.

    Raises:
        TypeError: an operand is not exactly a tensor: a subclass could compute while it is changed.
    """

    def __init__(self, read: DifferentiableInputs) -> None:
        # Of its own and seeded by the system, so that no seed that a backend sets foretells the changes.
        self._dice = random.Random(random.SystemRandom().getrandbits(128))
        operands = tuple(read.operands)
        self._attention = isinstance(read, Inputs)
        names = ("q", "k", "v") if self._attention else tuple(f"operand {index}" for index in range(len(operands)))
        tensors = dict(zip(names, operands, strict=True)) | {"d_out": read.d_out}
        for name, tensor in tensors.items():
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                raise TypeError(f"{name} of the backend's inputs is a {type(tensor).__name__}, not a torch.Tensor")
        self.tensors: dict[str, torch.Tensor] = tensors
        self._places = {name: _place(tensor) for name, tensor in tensors.items()}
        self._changeable = {name: _Changeable(tensor, self._dice) for name, tensor in tensors.items()}
        # The scores of hard values are no accident, and stay if q and k change alike.
        self._keeps_scores = isinstance(read, Inputs) and read.kind != NORMAL
        by_rows = ("d_out",) if not self._attention else ("v", "d_out") if self._keeps_scores else ("k", "v", "d_out")
        for name in by_rows:
            self._changeable[rows_of(name)] = _Changeable(tensors[name], self._dice, dim=-2)
        if self._attention:
            self._changeable["k"] = _Changeable(tensors["k"], self._dice, bits=self._changeable["q"].bits)
        self._bits = dict.fromkeys(self._changeable, 0)
        self._negated = False

    @property
    def state(self) -> State:
        """Return how the tensors differ now."""
        return State(dict(self._bits), self._negated)

    def renew(self, *, every: bool = False) -> None:
        """Change some of the tensors that a forward reads, at random, or every one, but not a block's weights.

        Not always all: a result that follows only one of them, say, is stale when that one stays. Of hard values q and
        k change alike, and v.
        """
        if self._keeps_scores:
            pattern = self._dice.randrange(_PATTERNS)
            for name in ("q", "k"):
                self._change(name, pattern)
            self._change("v")
            return
        read = [name for name in self.tensors if name != "d_out"]
        chosen = (1 << len(read)) - 1 if every else self._dice.randrange(1, 1 << len(read))
        for index, name in enumerate(read):
            if chosen >> index & 1:
                self._change(name)

    def renew_values(self) -> None:
        """Change channels of q and k alike, and of v: the output is that of before but for signs of channels.

        A block has no such inputs: its own are renewed as by `renew`.
        """
        if not self._attention:
            self.renew()
            return
        pattern = self._dice.randrange(_PATTERNS)
        for name in ("q", "k"):
            self._change_channels(name, pattern)
        self._change_channels("v", self._dice.randrange(_PATTERNS))

    def renew_gradient(self) -> None:
        """Change the output's gradient, which is all that a backward of a given forward may read anew."""
        self._change("d_out")

    def renew_gradient_along(self, dim: int) -> None:
        """Change only rows (-2) of the output's gradient, so that dq keeps its numbers, or channels (-1): dv does."""
        if dim == -1:
            self._change_channels("d_out", self._dice.randrange(_PATTERNS))
        else:
            self._change_rows("d_out")

    @property
    def has_normal_numbers(self) -> bool:
        """Whether these are attention's inputs of a normal distribution, so that others of it can take their place."""
        coded = any(tensor.element_size() == 1 for tensor in self.tensors.values())
        return self._attention and not self._keeps_scores and not coded

    @contextlib.contextmanager
    def other_numbers(self) -> Iterator[None]:
        """Have other normal numbers in what a forward reads; afterwards all is as it was."""
        read = [tensor.data for name, tensor in self.tensors.items() if name != "d_out"]
        read += [one.signs for one in self._changeable.values()]
        kept, bits, dice = [one.clone() for one in read], dict(self._bits), fresh_dice()
        try:
            for name, tensor in self.tensors.items():
                if name != "d_out":
                    tensor.data.copy_(torch.randn(tensor.shape, generator=dice))
            yield
        finally:
            for one, before in zip(read, kept, strict=True):
                one.copy_(before)
            self._bits = bits

    def signs(self, name: str) -> torch.Tensor:
        """Return the signs of a tensor's channels, or by `rows_of` its name of its rows, relative to those written."""
        return self._changeable[name].signs

    def _change(self, name: str, pattern: int | None = None) -> None:
        self._change_channels(name, self._dice.randrange(_PATTERNS) if pattern is None else pattern)
        if rows_of(name) in self._changeable:
            self._change_rows(name)

    def _change_channels(self, name: str, pattern: int) -> None:
        self._bits[name] ^= self._changeable[name].change(pattern)

    def _change_rows(self, name: str) -> None:
        key = rows_of(name)
        self._bits[key] ^= self._changeable[key].change(self._dice.randrange(_PATTERNS_OF_ROWS))

    def relative(self, state: State) -> State:
        """Return another state whose output is that of `state` but for the signs of channels; a block's has none."""
        if not self._attention:
            return state
        both = self._dice.getrandbits(self._changeable["q"].length) or 1
        values = self._dice.getrandbits(self._changeable["v"].length) or 1
        signs = state.signs
        return State(dict(signs) | {"q": signs["q"] ^ both, "k": signs["k"] ^ both, "v": signs["v"] ^ values})

    def set_forward(self, state: State) -> None:
        """Change what a forward reads into `state`; the output's gradient stays."""
        for name in self.tensors.keys() - {"d_out"}:
            self._set(name, state)

    def set_gradient(self, state: State, *, negated: bool) -> None:
        """Change the output's gradient into that of `state`, or into its negative."""
        self._set("d_out", state)
        if negated != self._negated:
            flip_signs(self.tensors["d_out"], every_channel(self.tensors["d_out"]))
        self._negated = negated

    def _set(self, name: str, state: State) -> None:
        for key, dim in ((name, -1), (rows_of(name), -2)):
            if key in self._bits:
                flip_signs(self.tensors[name], self._bits[key] ^ state.signs[key], dim)
                self._bits[key] = state.signs[key]

    @torch.no_grad()
    def write(self, values: DifferentiableInputs) -> None:
        """Write other values of the same shapes into the tensors, which are then those of a seed, unchanged."""
        for name, tensor in zip(self.tensors, (*values.operands, values.d_out), strict=True):
            self.tensors[name].data.copy_(tensor.detach())
        self._bits = dict.fromkeys(self._bits, 0)
        self._negated = False

    def written(self, seeded: Any) -> str | None:
        """Return the name of a tensor whose numbers are not those that were written into it, or None."""
        for name, tensor in self.tensors.items():
            # Freed memory must not be read.
            if _place(tensor) != self._places[name]:
                return name
        state = self.state
        for (name, tensor), like in zip(self.tensors.items(), (*seeded.operands, seeded.d_out), strict=True):
            wanted = like.detach().clone()
            apply_signs(wanted, state, name)
            if tensor.shape != wanted.shape or not torch.equal(bits_of(tensor), bits_of(wanted)):
                return name
        return None

    def changed(self, seeded: Any, state: State) -> Any:
        """Return inputs of the seed as they are in `state`, as new tensors: what a reference is computed of.

        Args:
            seeded: `Inputs`, or those of a block, which have the same tensors in the same order.
            state: the state.
        """
        made = {}
        for name, tensor in zip(self.tensors, (*seeded.operands, seeded.d_out), strict=True):
            copy = tensor.detach().clone()
            apply_signs(copy, state, name)
            made[name] = copy.requires_grad_(tensor.requires_grad)
        *operands, d_out = made.values()
        if isinstance(seeded, Inputs):
            q, k, v = operands
            return replace(seeded, q_bhsd=q, k_bhsd=k, v_bhsd=v, d_out_bhsd=d_out)
        return replace(seeded, operands=tuple(operands), d_out=d_out)
