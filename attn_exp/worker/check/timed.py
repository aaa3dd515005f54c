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

# Blocks of a pass that are checked, and the key-value heads of all rows of the batch in which they are.
_BLOCKS, _HEADS = 3, 2
# Tolerances are measured on the inputs of the seed. A few rows of others may round worse: dk of a head of 16 keys in
# float32 by 1.24 times (PyTorch's flash kernel on a CPU, one of 1,000 jobs).
_SLACK = 2.0


@dataclass(frozen=True)
class Kept:
    """Records of one block: its number, the inputs' state, rows of the results, and the factors of codes."""

    number: int
    state: frozenset[str]
    rows: Results
    scales: dict[str, float]


@dataclass
class TimedCheck:
    """Keeps rows of a few blocks of one pass, drawn of the first `blocks`."""

    case: Case
    direction: str
    contents: Contents
    form: ResultForm
    scales: Mapping[str, float]
    blocks: int
    kept: list[Kept] = field(default_factory=list)
    # Rows of queries and of keys, on the device; None for a block, whose results are kept whole.
    places: tuple[Places, Places] | None = None

    def __post_init__(self) -> None:
        drawn = _BLOCKS if self.case.workload is None else 1
        self._drawn = set(random.SystemRandom().sample(range(self.blocks), min(drawn, self.blocks)))
        self._on_device: dict[str, Places] = {}
        if self.case.workload is None and "q" in self.contents.tensors:
            heads = self.case.batch * self.case.kv_heads
            kv_heads = torch.randperm(heads, generator=fresh_dice())[:_HEADS].sort().values
            self.places = draw_places(self.case, kv_heads)
            of_queries, of_keys = (one.to(self.contents.tensors["d_out"].device) for one in self.places)
            self._on_device = {"out": of_queries, "dq": of_queries, "dk": of_keys, "dv": of_keys}

    def before_block(self, number: int) -> None:
        """Change the inputs before a block that is drawn: seldom, so that the device's load stays what it is."""
        if number in self._drawn:
            self.contents.change(self.direction)

    def after_block(self, number: int, last: Any) -> None:
        """Keep rows of what the last call of a drawn block returned.

        Raises:
            Stopped: it has another form than results have.
        """
        if number not in self._drawn or last is None:
            return
        results = self.form.results(self.direction, last)
        rows = {}
        for name, tensor in results.items():
            places = self._on_device.get(name)
            if places is not None:
                rows[name] = places.of(tensor)
            elif self.places is None:
                rows[name] = tensor.clone()
        self.kept.append(Kept(number, self.contents.state, rows, dict(self.scales)))

    def wrong(self, seeded: Any, first: Expected, whole: Callable[[Any], Expected]) -> str | None:
        """Return which block is wrong as a sentence, or None.

        Tolerances are those of `first`, the reference of the seed's inputs. `whole` returns the reference of other
        inputs, where results were kept whole.
        """
        tolerances = {name: bounds.times(_SLACK) for name, bounds in first.tolerances.items()}
        for one in self.kept:
            inputs = self.contents.changed(seeded, one.state)
            if self.places is not None:
                assert isinstance(inputs, Inputs)
                gradients = self.direction != "forward"
                expected = expected_at(self.case, inputs, self.places, with_gradients=gradients, tolerances=tolerances)
            else:
                expected = replace(whole(inputs), tolerances=tolerances)
            names = [name for name in one.rows if name in expected.tensors]
            wrong = inaccuracy(
                {name: expected.judge_rows(name, one.rows[name], one.scales.get(name, 1.0)) for name in names}
            )
            if wrong is not None:
                why = "it does not change with its inputs" if self._is_stale(one) else wrong
                which = f"timed block {one.number + 1}"
                return f"{self.direction}: the first call was within tolerance, {which} was not: {why}"
        return None

    def _is_stale(self, one: Kept) -> bool:
        """Whether a result is that of another block, whose inputs were others."""
        return any(
            other.state != one.state and all(torch.equal(other.rows[name], rows) for name, rows in one.rows.items())
            for other in self.kept
        )
