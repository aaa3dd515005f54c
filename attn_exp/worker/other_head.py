"""Calls on inputs of which one head is another, so that who keeps results by their inputs computes anew."""

import contextlib
import random
from collections.abc import Iterator

from attn_exp.attention.fresh_inputs import FreshInputs, flip_signs
from attn_exp.core.case import Case
from attn_exp.worker.judge.timed_pass import Results

# Of which tensors a head changes: a backward is one of a forward whose tensors stay.
_CHANGED = {"forward": ("q", "k", "v"), "backward": ("d_out",), "step": ("q", "k", "v", "d_out")}
# What heads of queries have; others are of heads of keys.
_OF_QUERIES = ("q", "d_out", "out", "dq", "d_sink")


class OtherHead:
    """Changes one head of keys with its queries, another one each time; heads do not depend on each other.

    Args:
        case: the problem, of an attention.
        fresh: the tensors that the calls read.
        direction: the pass.
    """

    def __init__(self, case: Case, fresh: FreshInputs, direction: str) -> None:
        self._case, self._dice = case, random.Random()
        self._tensors = {name: fresh.tensors[name] for name in _CHANGED[direction]}

    @contextlib.contextmanager
    def changed(self) -> Iterator[tuple[int, int]]:
        """Change signs of a head's channels inside; yield its row of the batch and its place among heads of keys."""
        batch, head = (self._dice.randrange(several) for several in (self._case.batch, self._case.kv_heads))
        bits = {name: self._dice.getrandbits(one.shape[-1]) or 1 for name, one in self._tensors.items()}

        def flip() -> None:
            for name, tensor in self._tensors.items():
                flip_signs(tensor[batch : batch + 1, self._heads(name, head)], bits[name])

        flip()
        try:
            yield batch, head
        finally:
            flip()

    def without(self, place: tuple[int, int], results: Results, usual: Results) -> Results:
        """Return copies of results that have in the place of the changed head what they usually have."""
        copies, (batch, head) = {name: tensor.clone() for name, tensor in results.items()}, place
        for name, copy in copies.items():
            # The gradient of sinks is the sum over the batch.
            at = (slice(None) if name == "d_sink" else batch, self._heads(name, head))
            copy[at] = usual[name][at]
        return copies

    def _heads(self, name: str, head: int) -> slice:
        group = self._case.q_heads // self._case.kv_heads if name in _OF_QUERIES else 1
        return slice(head * group, (head + 1) * group)
