"""What is kept of the timed calls of one pass."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from attn_exp.attention.call_sums import CallSums
from attn_exp.attention.fresh_inputs import State
from attn_exp.attention.links import Link, Rows
from attn_exp.attention.probe import Probe
from attn_exp.core.judged import Form
from attn_exp.worker.judge.cpu_time import CpuTimes

Results = dict[str, torch.Tensor]
_Kept = TypeVar("_Kept")


@dataclass(frozen=True)
class Kept:
    """Copies of one timed call's results.

    Attributes:
        results: by name; `out`, or the gradients.
        state: how the inputs differed from those of the seed.
        index: which call of its pass it was, from 1 on.
        forms: of the results, as they were before they were copied.
    """

    results: Results
    state: State
    index: int
    forms: dict[str, Form]


@dataclass(frozen=True)
class PlainTimes:
    """What timed calls take one by one.

    Attributes:
        times_us: in microseconds, by `OneCall`.
        fixed_us: what fixed work took then.
        products: how often one of them ran each operator that computes attention, None on a GPU.
    """

    times_us: list[float]
    fixed_us: float
    products: Counter[str] | None = None


@dataclass
class TimedPass:
    """One pass's timed calls so far.

    Attributes:
        names: of the tensors that a call returns.
        like: each tensor of the first call as an empty one of its form, on the device `meta`.
        count: how many calls a timer made.
        drawn: of a call chosen at random.
        last: of the call after the timing.
        result: what that call returned, with its graph.
        probes: of more calls chosen at random.
        sums: of the same calls of a backward.
        links: how far calls are off from the ones before them, where these tell what is right.
        linked: the tensor that the call before tells, None if it tells none.
        next_linked: the tensor that the call tells of the next one.
        rows: those of the call before, by tensor, if it tells this one.
        cpu: the CPU time of the calls, None on a GPU.
        plain: of a forward what it takes by itself, to be compared with later ones.
    """

    names: tuple[str, ...]
    like: Results
    count: int = 0
    draws: bool = False
    wants_last: bool = False
    drawn: Kept | None = None
    last: Kept | None = None
    result: Any = None
    probes: list[Probe] = field(default_factory=list)
    sums: list[CallSums] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    linked: str | None = None
    next_linked: str | None = None
    rows: dict[str, Rows] = field(default_factory=dict)
    cpu: CpuTimes | None = None
    plain: PlainTimes | None = None


def put(kept: list[_Kept], most: int, slot: int, one: _Kept) -> None:
    """Keep one more, in place of that in a slot if there are `most` already."""
    if len(kept) < most:
        kept.append(one)
    else:
        kept[slot] = one


def form_only(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor of the same form on the device `meta`."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def poison(likes: Iterable[torch.Tensor], device: torch.device) -> None:
    """Leave NaN in the memory that the next results will probably lie in: what a call does not write then shows."""
    for like in likes:
        if like.element_size() == 1:
            # The code of e4m3's NaN.
            torch.full(like.shape, 0x7F, dtype=torch.uint8, device=device)
        else:
            torch.full(like.shape, float("nan"), dtype=like.dtype, device=device)
