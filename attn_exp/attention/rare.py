"""A call on normal inputs with something rare among them, and the rows of its results that are judged."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from attn_exp.attention.biases import added_scores
from attn_exp.attention.error_parts import Tolerance
from attn_exp.attention.formula import seen_keys
from attn_exp.attention.inputs import Inputs
from attn_exp.attention.reference import capped
from attn_exp.attention.sinks import sinks_at, softmax
from attn_exp.core.case import Case
from attn_exp.core.text import apart

# What rows of scores with a standard deviation of 16 to 40 may be off by besides, and those of a softcap: who rounds
# scores changes weights by that, or in float32 who sums them in another order.
OF_SHARP = {"bfloat16": 0.5, "float16": 0.1, "float32": 3e-4}
# What rounding a sink's score may change the others' weights by.
OF_SINK = {"bfloat16": 0.25, "float16": 0.06, "float32": 3e-4}
# Rows of dk and dv with a smaller share of the typical norm are judged by this share: their terms may cancel.
_LEAST_NORM = 0.25
_AMONG = {
    "q": "with one large row of q among normal ones",
    "k": "with one large row of k among normal ones",
    "sink": "with a first key that has nearly all of the weight and no value",
}


@dataclass(frozen=True)
class Rare:
    """Inputs with a hard row, or with a sink.

    Attributes:
        case: the problem.
        inputs: the inputs.
        hard: the tensor whose row it is, or `sink`.
        batch: the row of the batch.
        head: the query head.
        queries: those that are judged, the first with the hard row.
        slack: what the output of each of these may be off by besides what one of normal inputs may.
        slack_of_dq: the same of their gradients, None if no backward is judged. Only they have a row of d_out in the
            heads that share their keys, so that dk and dv are those of a few queries.
        beside: other rows of the batch and heads of them, in which only the first query is judged.
        by_sink: a channel of dq that is the sink's own, None for none: it is large and hides others.
    """

    case: Case
    inputs: Inputs
    hard: Literal["q", "k", "sink"]
    batch: int
    head: int
    queries: torch.Tensor
    slack: torch.Tensor
    slack_of_dq: torch.Tensor | None = None
    beside: tuple[tuple[int, int], ...] = ()
    by_sink: int | None = None

    @torch.no_grad()
    def wrong(self, results: Mapping[str, torch.Tensor], tolerances: Mapping[str, Tolerance]) -> str | None:
        """Return which row of a call's results is wrong as a sentence, or None.

        Args:
            results: `out`, and where the backward is judged, `dq`, `dk` and `dv`.
            tolerances: of normal inputs, by the same names.
        """
        slack_of_dq = self.slack_of_dq if "dq" in results else None
        right = self._reference(self.batch, self.head, self.queries, with_gradients=slack_of_dq is not None)
        several = [self._of_out(results["out"], right["out"], tolerances["out"].own_row or 0.0)]
        if slack_of_dq is not None:
            several.append(self._of_gradients(results, right, tolerances, slack_of_dq))
        return next((wrong for wrong in itertools.chain(*several) if wrong is not None), None)

    def _of_out(self, out: torch.Tensor, right: torch.Tensor, own_row: float) -> Iterator[str | None]:
        places = [(self.batch, self.head, self.queries), *((*one, self.queries[:1]) for one in self.beside)]
        for index, (batch, head, queries) in enumerate(places):
            known = self._reference(batch, head, queries)["out"] if index else right
            error = (out[batch, head, queries.to(out.device)].float() - known).norm(dim=-1) / known.norm(dim=-1)
            yield self._wrong_row("out", batch, head, queries, error, own_row + self.slack[: len(queries)])

    def _of_gradients(
        self,
        gradients: Mapping[str, torch.Tensor],
        right: Mapping[str, torch.Tensor],
        tolerances: Mapping[str, Tolerance],
        slack_of_dq: torch.Tensor,
    ) -> Iterator[str | None]:
        # Squares of tiny numbers vanish in float32.
        dq, known = gradients["dq"][self.batch, self.head].double(), right["dq"].double()
        dq = dq[self.queries.to(dq.device)]
        if self.by_sink is not None:
            dq[:, self.by_sink] = known[:, self.by_sink] = 0.0
        # A row of dq is as small as its row of d_out.
        allowed = tolerances["dq"].worst_row + slack_of_dq
        yield self._wrong_row("dq", self.batch, self.head, self.queries, _errors(dq, known), allowed)
        head, keys, slack = self._kv_head(self.head), torch.arange(self.case.kv_len), slack_of_dq[1:].amax()
        for name in ("dk", "dv"):
            known = right[name].double()
            # Their terms may cancel.
            least = _LEAST_NORM * known.norm(dim=-1).square().mean().sqrt()
            error = _errors(gradients[name][self.batch, head].double(), known, least)
            allowed = (tolerances[name].worst_row + slack).expand(len(keys))
            yield self._wrong_row(name, self.batch, head, keys, error, allowed)

    def _wrong_row(
        self, name: str, batch: int, head: int, rows: torch.Tensor, error: torch.Tensor, allowed: torch.Tensor
    ) -> str | None:
        """Return the first row whose error is not allowed, as a sentence, or None."""
        beyond = (~(error <= allowed.to(error.device))).nonzero()
        if not len(beyond):
            return None
        first = int(beyond[0])
        found, of = float(error[first]), f"row {int(rows[first])} of {name} in head {head} of batch row {batch}"
        if not math.isfinite(found):
            return f"{_AMONG[self.hard]}, {of} has values that are not finite"
        off, most = apart(found, float(allowed[first]))
        return f"{_AMONG[self.hard]}, {of} is off by {off} of its norm, allowed is {most}"

    def _kv_head(self, head: int) -> int:
        return head // (self.case.q_heads // self.case.kv_heads)

    def _reference(
        self, batch: int, head: int, queries: torch.Tensor, *, with_gradients: bool = False
    ) -> dict[str, torch.Tensor]:
        """Return output and gradients of some queries of a head in float32; dk and dv as if these were all."""
        case, inputs, kv_head = self.case, self.inputs, self._kv_head(head)
        on_device = queries.to(inputs.q_bhsd.device)
        q, d_out = (one[batch, head, on_device].float() for one in (inputs.q_bhsd, inputs.d_out_bhsd))
        k, v = (one[batch, kv_head].float() for one in (inputs.k_bhsd, inputs.v_bhsd))
        first, last = (bound.to(q.device) for bound in seen_keys(case, queries))
        key = torch.arange(case.kv_len, device=q.device)
        hidden = (key > last[:, None]) | (key < first[:, None])
        scores, slope = capped(case, q @ k.mT * case.head_dim**-0.5)
        at = torch.tensor(head, device=q.device)
        added = added_scores(case, at, on_device, key)
        scores = scores if added is None else scores + added
        weights = softmax(scores.masked_fill(hidden, -torch.inf), sinks_at(case, at))
        out = weights @ v
        if not with_gradients:
            return {"out": out}
        d_scores = weights * (d_out @ v.mT - (d_out * out).sum(-1, keepdim=True)) * case.head_dim**-0.5
        d_scores = d_scores if slope is None else d_scores * slope
        return {"out": out, "dq": d_scores @ k, "dk": d_scores.mT @ q, "dv": weights.mT @ d_out}


def _errors(rows: torch.Tensor, known: torch.Tensor, least: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Return the error of each row by its norm, or by `least` if that is larger."""
    norm = known.norm(dim=-1)
    # What is zeros must be finite.
    error: torch.Tensor = (rows - known).norm(dim=-1) / torch.where(norm > 0, norm, torch.inf).clamp(min=least)
    return error
