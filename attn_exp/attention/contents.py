"""The contents of the tensors that calls read, changed in place so that no earlier result is right for them.

A change of sign is one small kernel a tensor, allocates nothing, keeps a normal distribution, and is exact: changing it
again restores the numbers.
"""

import contextlib
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from attn_exp.attention.inputs import DifferentiableInputs, Inputs
from attn_exp.core.case.case import NORMAL

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's bits: NaN equals itself then, and -0.0 is not 0.0."""
    # `data` has no version: no graph is told that a tensor it saved changed, just as when a serving engine writes a new
    # request into the tensors that a CUDA graph reads.
    return tensor.data.view(INTEGERS[tensor.element_size()])


# The numbers of a program that uses `random` stay what they are.
_DICE = random.SystemRandom()
# The tensors that are pools if a case has pages.
_IN_PAGES = ("k", "v")


def negate(tensor: torch.Tensor) -> None:
    """Change the sign of every number in place, codes included; no graph is told."""
    integers = bits_of(tensor)
    integers.bitwise_xor_(-1 << 8 * integers.element_size() - 1 if integers.dtype != torch.uint8 else 0x80)


class Contents:
    """Changes the tensors that a backend's calls read, and knows how they differ from what was written.

    `signs` are those of memory that rivals share: whether the numbers at an address have the other sign.
    """

    def __init__(self, read: DifferentiableInputs, signs: dict[int, bool] | None = None) -> None:
        operands = tuple(read.operands)
        is_attention = isinstance(read, Inputs)
        names = ("q", "k", "v") if is_attention else tuple(f"operand {index}" for index in range(len(operands)))
        self.tensors: dict[str, torch.Tensor] = dict(zip(names, operands, strict=True)) | {"d_out": read.d_out}
        self._places = {name: _place(tensor) for name, tensor in self.tensors.items()}
        # The scores of hard values are no accident, and stay if q and k change alike.
        self._keeps_scores = isinstance(read, Inputs) and read.kind != NORMAL
        self._paging = read.paging if isinstance(read, Inputs) else None
        # Latent values are channels of the keys.
        self._latent = isinstance(read, Inputs) and read.latent
        self._shared, self._own = signs or {}, dict[int, bool]()

    @property
    def state(self) -> frozenset[str]:
        """Return the names of the tensors whose sign differs from what was written."""
        return frozenset(name for name, tensor in self.tensors.items() if self._signs(tensor).get(tensor.data_ptr()))

    def change(self, direction: str) -> None:
        """Change what a pass reads: of a forward some of q, k and v, of a backward the output's gradient."""
        change_all([self], direction)

    def chosen(self, direction: str) -> set[str]:
        """Draw the names of the tensors to change."""
        chosen = {"d_out"} if direction != "forward" else set[str]()
        if direction != "backward":
            operands = [name for name in self.tensors if name != "d_out" and not (self._latent and name == "v")]
            if self._keeps_scores:
                chosen |= set(operands)
            else:
                chosen |= set(_DICE.sample(operands, _DICE.randint(1, len(operands))))
        return chosen

    def toggle(self, name: str) -> None:
        """Change the sign of a tensor's numbers."""
        tensor = self.tensors[name]
        signs, place = self._signs(tensor), tensor.data_ptr()
        negate(tensor)
        signs[place] = not signs.get(place)

    def _signs(self, tensor: torch.Tensor) -> dict[int, bool]:
        return self._shared if tensor.data_ptr() in self._shared else self._own

    @torch.no_grad()
    def write(self, values: DifferentiableInputs) -> None:
        """Write other values into the tensors; those of one row of the batch are written into all rows."""
        for name, tensor in zip(self.tensors, (*values.operands, values.d_out), strict=True):
            if self._paging is None or name not in _IN_PAGES:
                self.tensors[name].data.copy_(tensor.detach())
            elif not (self._latent and name == "v"):
                rows = len(self._paging.slots)
                self._paging.write(self.tensors[name], tensor.detach().expand(rows, -1, -1, -1))
        for tensor in self.tensors.values():
            self._signs(tensor)[tensor.data_ptr()] = False

    @contextlib.contextmanager
    def free_as(self, number: float, *, room: bool) -> Iterator[str]:
        """Fill memory beside the tensors that belongs to no request with a number; yield what that is, "" if none.

        `room` says that packed tokens have memory of their own behind them (attn_exp/attention/inputs.py, with_room).
        """
        free, what = list[tuple[torch.Tensor, torch.Tensor | slice]](), list[str]()
        for name, tensor in self.tensors.items():
            if self._paging is not None and name in _IN_PAGES:
                if self._latent and name == "v":
                    continue
                slots = self._paging.free_slots()
                pool = (tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor).data.flatten(0, 1)
                free += [(pool, slots)] if len(slots) else []
                what += ["slots without a key"] if len(slots) else []
            elif room and name != "d_out" and not (self._latent and name == "v"):
                behind = _behind(tensor)
                free += [(behind, slice(None))] if len(behind) else []
                what += ["memory behind the last token"] if len(behind) else []
        kept = [memory[places].clone() for memory, places in free]
        try:
            for memory, places in free:
                # A code with all bits of its exponent and mantissa is a NaN.
                memory[places] = 0x7F if memory.dtype == torch.uint8 else number
            yield " and ".join(dict.fromkeys(what))
        finally:
            for (memory, places), numbers in zip(free, kept, strict=True):
                memory[places] = numbers

    def written(self, seeded: Any) -> str | None:
        """Return the name of a tensor whose numbers are not those that were written into it, or None."""
        for name, tensor in self.tensors.items():
            # Freed memory must not be read.
            if _place(tensor) != self._places[name]:
                return name
        for name, like in zip(self.tensors, (*seeded.operands, seeded.d_out), strict=True):
            wanted = like.detach().clone()
            if name in self.state:
                negate(wanted)
            now = self.numbers(name)
            if now.shape != wanted.shape or not torch.equal(bits_of(now), bits_of(wanted)):
                return name
        return None

    def numbers(self, name: str) -> torch.Tensor:
        """Return a tensor as it is now with the shape of a case's: itself, or of pages a copy."""
        tensor = self.tensors[name]
        return self._paging.read(tensor) if self._paging is not None and name in _IN_PAGES else tensor

    def changed(self, seeded: Any, state: Collection[str]) -> Any:
        """Return inputs of the seed, of which the named tensors have the other sign, for a reference."""
        made = []
        for name, tensor in zip(self.tensors, (*seeded.operands, seeded.d_out), strict=True):
            copy = tensor.detach().clone()
            if name in state:
                negate(copy)
            made.append(copy.requires_grad_(tensor.requires_grad))
        *operands, d_out = made
        if isinstance(seeded, Inputs):
            q, k, v = operands
            return replace(seeded, q_bhsd=q, k_bhsd=k, v_bhsd=v, d_out_bhsd=d_out)
        return replace(seeded, operands=tuple(operands), d_out=d_out)


def change_all(several: Sequence[Contents], direction: str) -> None:
    """Change what a pass of several rivals reads, alike; memory that some share is changed once."""
    chosen, changed = several[0].chosen(direction), set[int]()
    for contents in several:
        for name in chosen:
            place = contents.tensors[name].data_ptr()
            if place not in changed:
                changed.add(place)
                contents.toggle(name)


def _behind(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory behind the last number of a dense tensor, as one row."""
    size, end = tensor.untyped_storage().nbytes() // tensor.element_size(), tensor.storage_offset() + tensor.numel()
    return tensor.data.as_strided((size - end,), (1,), end)


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor lies, and the bytes of the memory that it lies in."""
    return tensor.data_ptr(), tensor.untyped_storage().nbytes()
