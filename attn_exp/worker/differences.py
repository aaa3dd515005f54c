"""Compare tensors bit by bit on their device: nothing waits until what was found is read."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, prod

import torch

from attn_exp.attention.contents import INTEGERS, bits_of
from attn_exp.core.record.checked import Difference


@dataclass(frozen=True)
class Compared:
    """Differences of a tensor from another one of its shape and dtype, found on the device.

    Attributes:
        found: int64 (7,): the number of elements that differ; the first one's flat index, its bits here and in the
            other; the bits of the largest difference as a float64; how many elements are not finite here alone, and in
            the other alone.
        shape: the tensors' shape.
        dtype: their dtype.
    """

    found: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor, usual: torch.Tensor) -> "Compared":
        """Compare a tensor with what it usually is."""
        ours, theirs = bits_of(tensor), bits_of(usual)
        differs = ours != theirs
        # The first of several largest ones.
        place = differs.flatten().view(torch.uint8).argmax()
        # PyTorch does not subtract codes. In 16 bits the difference of neighbours is exact.
        wide = torch.float32 if tensor.element_size() == 1 else tensor.dtype
        here, there = tensor.detach().to(wide), usual.detach().to(wide)
        largest = torch.where(differs, (here - there).abs_(), 0).amax().double()
        finite, usually_finite = here.isfinite(), there.isfinite()
        spoiled = (~finite & usually_finite).sum(), (finite & ~usually_finite).sum()
        parts = (differs.sum(), place, ours.take(place), theirs.take(place), largest.view(torch.int64), *spoiled)
        found = torch.stack([part.to(torch.int64) for part in parts])
        return cls(found, tuple(tensor.shape), tensor.dtype)


def first_differences(compared: Sequence[Compared]) -> list[tuple[int, ...]]:
    """Return `found` of each comparison as numbers; the device is waited for once."""
    return [tuple(row) for row in torch.stack([one.found for one in compared]).tolist()] if compared else []


def difference(one: Compared, found: Sequence[int], tensor: str, result: str) -> Difference | None:
    """Return the first difference of a result as a record keeps it, by its numbers, or None if there is none."""
    count, place, ours, theirs, largest, *_ = found
    if not count:
        return None
    max_abs = torch.tensor(largest, dtype=torch.int64).view(torch.float64).item()
    return Difference(
        result=result,
        tensor=tensor,
        index=index_of(place, one.shape),
        value=_element(ours, one.dtype),
        usual=_element(theirs, one.dtype),
        elements=count,
        elements_of=prod(one.shape),
        max_abs=max_abs if isfinite(max_abs) else None,
    )


def index_of(place: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of an element by its place in the flattened tensor."""
    index: list[int] = []
    for size in reversed(shape):
        place, at = divmod(place, size)
        index.insert(0, at)
    return tuple(index)


def _element(bits: int, dtype: torch.dtype) -> str:
    """Return an element as a number with its bits: `-0 (0x8000)`."""
    size = dtype.itemsize
    value = torch.tensor(bits, dtype=INTEGERS[size]).view(dtype).float().item()
    return f"{value:.9g} (0x{bits & (1 << 8 * size) - 1:0{2 * size}x})"
