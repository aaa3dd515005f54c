"""Sums of one timed backward, taken at once from what it read and returned: they need no reference.

They are those of attn_exp/attention/head_sums.py: dv of all keys sums to d_out, qT dq is dkT k, and dvT v is d_outT
out. Of the latter two, products with a few random vectors are compared, which cost as much as reading the tensors.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from attn_exp.attention.formula import seen_keys
from attn_exp.attention.head_sums import LEAST_KEYS, LEAST_SUM, allowed_sum
from attn_exp.attention.inputs import Inputs, Scales
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
        of_weights: d_outT out and dvT v times the vectors, (2, kv_heads, value_dim, vectors); None if they are not.
        scales: the factors of the results, by name, if they are codes: a later backward may have others.
    """

    batch: int
    index: int
    of_values: torch.Tensor
    of_scores: torch.Tensor | None
    of_weights: torch.Tensor | None = None
    scales: Mapping[str, float] = field(default_factory=dict)


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
        self._of_values: torch.Tensor | None = None
        # Rounding is as large as sums of hard values, and as what cancels where keys are few.
        if inputs.kind == NORMAL and case.most_keys >= LEAST_KEYS:
            if case.head_dim >= _LEAST_DIM:
                self._vectors = _signs(case.head_dim, inputs.q_bhsd)
            if case.value_dim >= _LEAST_DIM:
                self._of_values = _signs(case.value_dim, inputs.v_bhsd)

    @torch.no_grad()
    def taken(
        self, batch: int, index: int, gradients: Sequence[torch.Tensor], out: torch.Tensor | None = None
    ) -> CallSums:
        """Return the sums of a row of the batch of dq, dk and dv, as the inputs are now; nothing waits for them.

        Args:
            batch: the row of the batch.
            index: which call of its pass it was.
            gradients: dq, dk and dv.
            out: the output whose backward it is, None where it is not known.
        """
        dq, dk, dv, q, k, v = (one[batch] for one in (*gradients, *self._inputs.qkv))
        every = self._inputs.d_out_bhsd[batch]
        d_out = every if self._seeing is None else every[:, self._seeing]
        of_values = torch.stack([_sum(dv), self._of_groups(_sum(d_out))])
        of_scores = of_weights = None
        if self._vectors is not None:
            sides = (self._of_groups(_product(q, dq, self._vectors)), _product(dk, k, self._vectors))
            of_scores = torch.stack(sides)
        if self._of_values is not None and out is not None:
            of_outputs = _product(every, out[batch], self._of_values)
            sides = (self._of_groups(of_outputs), _product(dv, v, self._of_values))
            of_weights = torch.stack(sides)
        return CallSums(batch, index, of_values, of_scores, of_weights, dict(self._scales))

    @torch.no_grad()
    def wrong(self, several: Sequence[CallSums], relative: Mapping[str, float]) -> tuple[int, str] | None:
        """Return the index of a call whose sums are wrong, and what is wrong as a sentence, or None.

        Args:
            several: the sums of calls.
            relative: the tolerances of `dq`, `dk` and `dv`, and of `out`.
        """
        if not several:
            return None
        scales = self._inputs.scales or Scales(1.0, 1.0, 1.0, 1.0)

        def made(name: str) -> torch.Tensor:
            """Return the factor of each call's codes, (calls, 1, 1)."""
            return sums.new_tensor([one.scales.get(name, 1.0) for one in several])[:, None, None]

        sums = torch.stack([one.of_values for one in several], 1)
        of_dv, wanted = sums[0] * made("dv"), sums[1] * scales.d_out
        size = torch.stack([self._size(one.batch) for one in several]) * (LEAST_SUM * scales.d_out)
        errors, said, allowed = [], [], []
        if not self._case.sink:
            # With a sink the weights of a query sum to less than one.
            errors.append((of_dv - wanted).norm(dim=-1) / wanted.norm(dim=-1).maximum(size).clamp(min=_TINY))
            said.append("dv of all keys does not sum to d_out")
            allowed.append(allowed_error(relative["dv"]))
        of_scores = [one.of_scores for one in several if one.of_scores is not None]
        if len(of_scores) == len(several):
            errors.append(_apart(of_scores, scales.q * made("dq"), scales.k * made("dk")))
            said.append("dkT k is not qT dq")
            allowed.append(allowed_sum(max(relative["dk"], relative["dq"])))
        of_weights = [one.of_weights for one in several if one.of_weights is not None]
        if len(of_weights) == len(several):
            errors.append(_apart(of_weights, scales.d_out * made("out"), scales.v * made("dv")))
            said.append("dvT v is not d_outT out")
            allowed.append(allowed_sum(max(relative["dv"], relative["out"])))
        if not errors:
            return None
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


def _apart(several: Sequence[torch.Tensor], of_one: torch.Tensor, of_other: torch.Tensor) -> torch.Tensor:
    """Return how far both sides of sums are apart, relative to the larger one, (calls, heads).

    Args:
        several: both sides of each call, (2, heads, dim, vectors).
        of_one: the factors of the first side, (calls, 1, 1).
        of_other: those of the second.
    """
    sides = torch.stack(list(several), 1).flatten(3).float()
    one, other = sides[0] * of_one, sides[1] * of_other
    larger = one.norm(dim=-1).maximum(other.norm(dim=-1)).clamp(min=_TINY)
    off: torch.Tensor = (one - other).norm(dim=-1) / larger
    return off


def _signs(length: int, like: torch.Tensor) -> torch.Tensor:
    """Return random vectors of signs, (length, vectors), in the numbers that products with a tensor are made in."""
    signs = torch.randint(2, (length, _VECTORS), generator=fresh_dice()) * 2 - 1
    return _numbers(signs.to(like.device, like.dtype))


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
    return torch.bmm(left.mT, torch.bmm(right, vectors.expand(len(right), -1, -1)))
