"""Probes: a few rows of one head of many timed calls, so that also a call that nobody drew as a whole is looked at.

Rows of `out` and dq need only their own queries and the keys of their head: a probe costs next to nothing.
"""

import math
import random
from dataclasses import dataclass

import torch

from attn_exp.attention.error_parts import VANISHING
from attn_exp.attention.formula import seen_keys
from attn_exp.attention.fresh_inputs import State, apply_signs
from attn_exp.attention.inputs import Inputs
from attn_exp.core.case import Case

_ROWS = 16
# The error of a stale result is 1.4 of its norm; a few rows of fp8 may be off by a quarter.
_MOST = 0.5
# Late rows of a causal mask are a third of the usual size.
_LEAST = 0.3


@dataclass(frozen=True)
class Place:
    """Some rows of one head of one row of the batch; `rows` (n,) lies on the tensors' device."""

    batch: int
    q_head: int
    rows: torch.Tensor

    @classmethod
    def drawn(cls, case: Case, dice: random.Random, device: torch.device) -> "Place":
        """Return a random place."""
        rows = sorted(dice.sample(range(case.q_len), min(_ROWS, case.q_len)))
        return cls(dice.randrange(case.batch), dice.randrange(case.q_heads), torch.tensor(rows, device=device))

    def of(self, tensor_bhsd: torch.Tensor) -> torch.Tensor:
        """Return a copy of the rows, (n, dim), made by one kernel on the current stream."""
        rows = torch.Tensor.detach(tensor_bhsd)[self.batch, self.q_head]
        if rows.element_size() == 1:
            # Codes cannot be indexed on every device; their bits can.
            return rows.view(torch.uint8).index_select(0, self.rows).view(rows.dtype)
        return rows.index_select(0, self.rows)


@torch.no_grad()
def probe_error(
    case: Case, seeded: Inputs, state: State, place: Place, name: str, found: torch.Tensor, scale: float, usual: float
) -> float:
    """Return the relative error of rows of `out` or `dq`, infinite if they are not finite.

    Args:
        case: the problem.
        seeded: the inputs of the seed.
        state: how those of the call differed.
        place: which rows.
        name: `out` or `dq`.
        found: the call's rows (n, dim).
        scale: their factor if they are codes.
        usual: the root mean square of the whole tensor (see `usual_size`). Rows that nearly vanish beside it are not
            judged by their own norm.
    """
    numbers = seeded.numbers()
    kv_head = place.q_head // (case.q_heads // case.kv_heads)
    q, k, v, d_out = (
        _changed(tensor[place.batch, head], state, channel)
        for tensor, head, channel in (
            (numbers.q_bhsd, place.q_head, "q"),
            (numbers.k_bhsd, kv_head, "k"),
            (numbers.v_bhsd, kv_head, "v"),
            (numbers.d_out_bhsd, place.q_head, "d_out"),
        )
    )
    scores = q[place.rows] @ k.mT * case.head_dim**-0.5
    slope = None
    if case.softcap is not None:
        bent = torch.tanh(scores / case.softcap)
        scores, slope = case.softcap * bent, 1 - bent * bent
    first, last = seen_keys(case, place.rows)
    key = torch.arange(case.kv_len, device=scores.device)
    hidden = (key < first[:, None]) | (key > last[:, None])
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1).nan_to_num(0.0)
    wanted = weights @ v
    if name == "dq":
        d_rows = d_out[place.rows]
        d_scores = weights * (d_rows @ v.mT - (d_rows * wanted).sum(-1, keepdim=True))
        wanted = (d_scores if slope is None else d_scores * slope) @ k * case.head_dim**-0.5
    norm = max(float(wanted.norm()), _LEAST * usual * wanted.numel() ** 0.5)
    error = float((found.float() * scale - wanted).norm()) / norm
    return error if math.isfinite(error) else math.inf


def usual_size(tensor: torch.Tensor) -> float:
    """Return the root mean square of a reference, or 1.0, the inputs' own, where it vanishes."""
    size = float(tensor.square().mean().sqrt())
    return size if size > VANISHING else 1.0


def allowed_error(relative: float) -> float:
    """Return the error that a probe may have where whole tensors may have `relative`, infinite if that is."""
    return min(_MOST, 12 * relative) if math.isfinite(relative) else math.inf


def _changed(tensor: torch.Tensor, state: State, name: str) -> torch.Tensor:
    changed = tensor.detach().float().clone()
    apply_signs(changed, state, name)
    return changed
