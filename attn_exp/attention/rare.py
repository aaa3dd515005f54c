"""A forward on normal inputs with something rare among them, and the rows of its output that are judged."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from attn_exp.attention.formula import seen_keys
from attn_exp.attention.inputs import Inputs
from attn_exp.core.case import Case
from attn_exp.core.text import apart

# What rows of scores with a standard deviation of 16 to 40 may be off by besides, and those of a softcap: who rounds
# scores changes weights by that, or in float32 who sums them in another order.
_OF_SHARP = {"bfloat16": 0.5, "float16": 0.1, "float32": 1e-4}
# What rounding a sink's score may change the others' weights by.
_OF_SINK = {"bfloat16": 0.25, "float16": 0.06, "float32": 1e-4}
_AMONG = {
    "q": "with one large row of q among normal ones",
    "k": "with one large row of k among normal ones",
    "sink": "with a first key that has nearly all of the weight and no value",
}


@dataclass(frozen=True)
class Rare:
    """Inputs with a hard row.

    Attributes:
        case: the problem.
        inputs: the inputs.
        hard: the tensor whose row it is, or `sink`.
        batch: the row of the batch.
        head: the query head.
        queries: those that are judged, the first with the large score, or with deeply negative ones beside a sink.
        beside: other rows of the batch and heads of them, in which only the first query is judged.
    """

    case: Case
    inputs: Inputs
    hard: Literal["q", "k", "sink"]
    batch: int
    head: int
    queries: torch.Tensor
    beside: tuple[tuple[int, int], ...] = ()

    @torch.no_grad()
    def wrong(self, out: torch.Tensor, own_row: float) -> str | None:
        """Return which row of a call's output is wrong as a sentence, or None.

        Args:
            out: the output.
            own_row: what a row of normal inputs may be off by, by its own norm.
        """
        places = [(self.batch, self.head, self.queries), *((*one, self.queries[:1]) for one in self.beside)]
        for batch, head, queries in places:
            right, rows = self._reference(batch, head, queries), out[batch, head, queries.to(out.device)].float()
            error = ((rows - right).norm(dim=-1) / right.norm(dim=-1)).tolist()
            for index, found in enumerate(error):
                allowed = own_row + self._rounded(index)
                if found <= allowed:
                    continue
                of = f"row {int(queries[index])} of out in head {head} of batch row {batch}"
                if not math.isfinite(found):
                    return f"{_AMONG[self.hard]}, {of} has values that are not finite"
                off, most = apart(found, allowed)
                return f"{_AMONG[self.hard]}, {of} is off by {off} of its norm, allowed is {most}"
        return None

    def _rounded(self, index: int) -> float:
        """Return what a judged row may be off by besides, because scores are rounded."""
        if self.hard == "sink" and index:
            return _OF_SINK.get(self.case.dtype, 0.0)
        # Scores beside a sink are large where they are negative, and the hard row of k makes those of others sharp. The
        # row with a large one is v at its key, but with a softcap, to which two scores are near.
        sharp = self.hard == "sink" or (self.hard == "k" and index) or self.case.softcap is not None
        return _OF_SHARP.get(self.case.dtype, 0.0) if sharp else 0.0

    def _reference(self, batch: int, head: int, queries: torch.Tensor) -> torch.Tensor:
        case, inputs = self.case, self.inputs
        kv_head = head // (case.q_heads // case.kv_heads)
        q = inputs.q_bhsd[batch, head, queries.to(inputs.q_bhsd.device)].float()
        k, v = (one[batch, kv_head].float() for one in (inputs.k_bhsd, inputs.v_bhsd))
        first, last = (bound.to(q.device) for bound in seen_keys(case, queries))
        key = torch.arange(case.kv_len, device=q.device)
        hidden = (key > last[:, None]) | (key < first[:, None])
        scores = q @ k.mT * case.head_dim**-0.5
        if case.softcap is not None:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        return torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1) @ v
