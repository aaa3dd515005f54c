"""Sums of one timed backward, taken at once from what it read and returned: they need no reference.

They are those of attn_exp/attention/head_sums.py: dv of all keys sums to d_out, and qT dq is dkT k. Of the latter,
products with a few random vectors are compared, which cost as much as reading the tensors.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from attn_exp.attention.formula import seen_keys
from attn_exp.attention.head_sums import LEAST_KEYS, LEAST_SUM, allowed_sum, fewest_keys
from attn_exp.attention.inputs import Inputs
from attn_exp.attention.probe import allowed_error
from attn_exp.attention.sampling import fresh_dice
from attn_exp.core.case import NORMAL, Case
from attn_exp.core.text import apart

# Random vectors, and the dimensions from which on their products are never small by chance.
_VECTORS, _LEAST_DIM = 8, 16
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class CallSums:
    """Both sides of the sums of the heads of one row of the batch.

    Attributes:
        batch: the row of the batch.
        index: which call of its pass it was, from 1 on.
        of_values: of dv over all keys, and of d_out over all queries that see a key, (2, kv_heads, value_dim) in
            float32.
        of_scores: qT dq and dkT k times the vectors, (2, kv_heads, head_dim, vectors); None if they are not compared.
    """

    batch: int
    index: int
    of_values: torch.Tensor
    of_scores: torch.Tensor | None


class Summing:
    """Takes the sums of calls of one job, and compares them.

    Args:
        case: the problem.
        inputs: what the calls read; they change in place.
        scales: the factors of gradients in codes, which are known after the first call.
    """

    def __init__(self, case: Case, inputs: Inputs, scales: Mapping[str, float]) -> None:
        self._case, self._inputs, self._scales = case, inputs, scales
        device = inputs.q_bhsd.device
        rows = torch.arange(case.q_len)
        first, last = seen_keys(case, rows)
        self._seeing = rows[first <= last].to(device) if case.keyless else None
        self._vectors: torch.Tensor | None = None
        # Rounding is as large as sums of hard values, and as what cancels where keys are few.
        if inputs.kind == NORMAL and case.head_dim >= _LEAST_DIM and fewest_keys(case) >= LEAST_KEYS:
            signs = torch.randint(2, (case.head_dim, _VECTORS), generator=fresh_dice()) * 2 - 1
            self._vectors = _numbers(signs.to(device, inputs.q_bhsd.dtype))

    @torch.no_grad()
    def taken(self, batch: int, index: int, gradients: Sequence[torch.Tensor]) -> CallSums:
        """Return the sums of a row of the batch of dq, dk and dv, as the inputs are now; nothing waits for them."""
        dq, dk, dv = (torch.Tensor.detach(one)[batch] for one in gradients)
        q, k = (one.detach()[batch] for one in (self._inputs.q_bhsd, self._inputs.k_bhsd))
        d_out = self._inputs.d_out_bhsd[batch]
        d_out = d_out if self._seeing is None else d_out[:, self._seeing]
        of_values = torch.stack([_sum(dv), self._of_groups(_sum(d_out))])
        if self._vectors is None:
            return CallSums(batch, index, of_values, None)
        sides = (self._of_groups(_product(q, dq, self._vectors)), _product(dk, k, self._vectors))
        return CallSums(batch, index, of_values, torch.stack(sides))

    @torch.no_grad()
    def wrong(self, several: Sequence[CallSums], relative: Mapping[str, float]) -> tuple[int, str] | None:
        """Return the index of a call whose sums are wrong, and what is wrong as a sentence, or None.

        Args:
            several: the sums of calls.
            relative: the tolerances of `dq`, `dk` and `dv`.
        """
        if not several:
            return None
        scales = self._inputs.scales
        of_d_out = 1.0 if scales is None else scales.d_out
        sums = torch.stack([one.of_values for one in several], 1)
        of_dv, wanted = sums[0] * self._scales.get("dv", 1.0), sums[1] * of_d_out
        size = torch.stack([self._size(one.batch) for one in several]) * (LEAST_SUM * of_d_out)
        errors = [(of_dv - wanted).norm(dim=-1) / wanted.norm(dim=-1).maximum(size).clamp(min=_TINY)]
        said, allowed = ["dv of all keys does not sum to d_out"], [allowed_error(relative["dv"])]
        if self._vectors is not None:
            sides = torch.stack([one.of_scores for one in several if one.of_scores is not None], 1).flatten(3)
            by_name = [
                (scales.q if scales else 1.0) * self._scales.get("dq", 1.0),
                (scales.k if scales else 1.0) * self._scales.get("dk", 1.0),
            ]
            of_queries, of_keys = (side.float() * factor for side, factor in zip(sides, by_name, strict=True))
            larger = of_queries.norm(dim=-1).maximum(of_keys.norm(dim=-1)).clamp(min=_TINY)
            errors.append((of_queries - of_keys).norm(dim=-1) / larger)
            said.append("dkT k is not qT dq")
            allowed.append(allowed_sum(max(relative["dk"], relative["dq"])))
        worst, heads = torch.stack(errors).nan_to_num(math.inf, math.inf).max(-1)
        for what, most, of_calls, of_heads in zip(said, allowed, worst.tolist(), heads.tolist(), strict=True):
            for one, error, head in zip(several, of_calls, of_heads, strict=True):
                if error > most:
                    off, at_most = apart(error, most)
                    where = f"head {head} of batch row {one.batch}"
                    return one.index, f"{what} in {where}: off by {off} of its norm, allowed is {at_most}"
        return None

    def _of_groups(self, of_heads: torch.Tensor) -> torch.Tensor:
        """Add what belongs to the query heads of each group, (q_heads, ...), in float32 or more."""
        group = self._case.q_heads // self._case.kv_heads
        wide = of_heads if of_heads.dtype == torch.float64 else of_heads.float()
        return wide if group == 1 else wide.unflatten(0, (-1, group)).sum(1)

    def _size(self, batch: int) -> torch.Tensor:
        """Return the usual size of sums of d_out of a row of the batch, (kv_heads,); no sign changes it."""
        d_out = self._inputs.d_out_bhsd[batch]
        of_heads = torch.linalg.vector_norm(_wide(d_out), dim=(1, 2), dtype=torch.float32)
        return self._of_groups(of_heads.square()).sqrt()


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return codes as float32, which they cannot be summed in otherwise; other tensors as they are."""
    return tensor.float() if tensor.element_size() == 1 else tensor


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return float32 as float64: a backend may have let products of float32 lose bits."""
    return tensor.double() if tensor.dtype == torch.float32 else _wide(tensor)


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum over tokens, (heads, dim) in float32."""
    return _wide(tensor).sum(1, dtype=torch.float32)


def _product(left: torch.Tensor, right: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Return leftT right times the vectors of each head, (heads, dim, vectors), without copies of 16-bit tensors."""
    left, right = (_numbers(one).to(vectors.dtype) for one in (left, right))
    made = torch.bmm(left.mT, torch.bmm(right, vectors.expand(len(right), -1, -1)))
    return made if made.dtype == torch.float64 else made.float()
