"""Check blocks that were timed: rows of what their last calls returned are compared with references of their inputs.

The inputs change in place before these blocks, so that an output that was cached, or computed from a copy of earlier
inputs, is wrong. Rows are copied behind the block, on the stream of its calls: work that this stream does not wait for
is missing. They are compared after the timing.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from attn_exp.attention.contents import Contents
from attn_exp.attention.error import inaccuracy
from attn_exp.attention.expected import Expected, expected_at
from attn_exp.attention.inputs import Inputs
from attn_exp.attention.sampled import draw_places
from attn_exp.attention.sampling import Places, fresh_dice
from attn_exp.core.case.case import Case
from attn_exp.worker.check.form import ResultForm, Results

# Blocks that are drawn of all of a pass beside the last one, and the key-value heads of all rows of the batch in which
# the rows of each are.
_DRAWN, _HEADS = 2, 2
# Tolerances are measured on the inputs of the seed. A few rows of others may round worse: dk of a head of 16 keys in
# float32 by 1.24 times (PyTorch's flash kernel on a CPU, one of 1,000 jobs).
_SLACK = 2.0


@dataclass(frozen=True)
class Kept:
    """Records of one block: its round, the inputs' state, rows of the results, and the factors of codes.

    `places` are the rows of queries and of keys, on the CPU; None for a block's whole results.
    """

    number: int
    state: frozenset[str]
    rows: Results
    scales: dict[str, float]
    places: tuple[Places, Places] | None


class Draw:
    """Draws the rounds of a pass that are checked: the last one, and two of all others by reservoir sampling.

    Vitter, ACM Transactions on Mathematical Software 11, 37 (1985): every round is as likely, however many come. A
    transformer block's results are kept whole, and of one round beside the last.
    """

    def __init__(self, *, whole: bool) -> None:
        self._size = 1 if whole else _DRAWN
        self._dice = random.SystemRandom()

    def slot(self, number: int, last: bool) -> int | None:
        """Return the place in which a round's results are kept, in that of an earlier one; None if it is not drawn."""
        if last:
            return self._size
        slot = number if number < self._size else self._dice.randrange(number + 1)
        return slot if slot < self._size else None


@dataclass
class TimedCheck:
    """Keeps rows of a few blocks of one pass."""

    case: Case
    direction: str
    contents: Contents
    form: ResultForm
    scales: Mapping[str, float]
    kept: dict[int, Kept] = field(default_factory=dict)
    # The slot of the present round, and the rows of queries and keys of it, on the device; None if it is not kept.
    _slot: int | None = None
    _places: tuple[Places, Places] | None = None
    _on_device: dict[str, Places] = field(default_factory=dict)

    def begin(self, slot: int | None) -> None:
        """Draw the rows of a round that is kept in this place, or of none."""
        self._slot = slot
        if slot is None or self.case.workload is not None or "q" not in self.contents.tensors:
            return
        heads = self.case.batch * self.case.kv_heads
        kv_heads = torch.randperm(heads, generator=fresh_dice())[:_HEADS].sort().values
        self._places = draw_places(self.case, kv_heads)
        of_queries, of_keys = (places.to(self.contents.tensors["d_out"].device) for places in self._places)
        self._on_device = {"out": of_queries, "dq": of_queries, "dk": of_keys, "dv": of_keys}

    def after_block(self, number: int, last: Any) -> None:
        """Keep rows of what the last call of a drawn round's block returned.

        Raises Stopped if it has another form than results have.
        """
        if self._slot is None or last is None:
            return
        results = self.form.results(self.direction, last)
        rows = {}
        for name, tensor in results.items():
            places = self._on_device.get(name)
            if places is not None:
                rows[name] = places.of(tensor)
            elif self._places is None:
                rows[name] = tensor.clone()
        self.kept[self._slot] = Kept(number, self.contents.state, rows, dict(self.scales), self._places)

    def wrong(self, seeded: Any, first: Expected, whole: Callable[[Any], Expected]) -> str | None:
        """Return which block is wrong as a sentence, or None.

        Tolerances are those of `first`, the reference of the seed's inputs. `whole` returns the reference of other
        inputs, where results were kept whole.
        """
        tolerances = {name: bounds.times(_SLACK) for name, bounds in first.tolerances.items()}

        def off(block: Kept, state: frozenset[str]) -> str | None:
            inputs = self.contents.changed(seeded, state)
            if block.places is not None:
                assert isinstance(inputs, Inputs)
                gradients = self.direction != "forward"
                expected = expected_at(self.case, inputs, block.places, with_gradients=gradients, tolerances=tolerances)
            else:
                expected = replace(whole(inputs), tolerances=tolerances)
            names = [name for name in block.rows if name in expected.tensors]
            return inaccuracy(
                {name: expected.judge_rows(name, block.rows[name], block.scales.get(name, 1.0)) for name in names}
            )

        for block in self.blocks:
            wrong = off(block, block.state)
            if wrong is not None:
                others = {frozenset[str](), *(other.state for other in self.blocks)} - {block.state}
                stale = any(off(block, state) is None for state in others)
                why = "it does not change with its inputs" if stale else wrong
                which = f"timed block {block.number + 1}"
                return f"{self.direction}: the first call was within tolerance, {which} was not: {why}"
        return None

    @property
    def blocks(self) -> list[Kept]:
        """The kept blocks in the order of their rounds."""
        return sorted(self.kept.values(), key=lambda block: block.number)
