"""Probes: a few rows of one head of many timed calls, so that also a call that nobody drew as a whole is looked at.

Rows of `out` and dq need only their own queries and the keys of their head: probes cost next to nothing, and all of a
pass are computed together.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from attn_exp.attention.error_parts import VANISHING
from attn_exp.attention.formula import seen_keys
from attn_exp.attention.fresh_inputs import State, rows_of, sign_factors
from attn_exp.attention.head_sums import allowed_sum, sums_of_dv
from attn_exp.attention.inputs import Inputs
from attn_exp.attention.reference import capped
from attn_exp.core.case import Case

_ROWS = 16
# Late rows of a causal mask are a third of the usual size.
_LEAST = 0.3
# Keys of all heads that are computed together: 64 MiB in float32 with 128 channels.
_KEYS = 1 << 17


@dataclass(frozen=True)
class Place:
    """Some rows of one head of one row of the batch; `rows` (n,) lies on the tensors' device."""

    batch: int
    q_head: int
    rows: torch.Tensor

    @classmethod
    def drawn(cls, case: Case, dice: random.Random, device: torch.device, count: int) -> list["Place"]:
        """Return `count` random places."""
        several = [sorted(dice.sample(range(case.q_len), min(_ROWS, case.q_len))) for _ in range(count)]
        rows = torch.tensor(several, device=device)
        return [cls(dice.randrange(case.batch), dice.randrange(case.q_heads), of) for of in rows]

    def sum_of_keys(self, tensor_bhsd: torch.Tensor, group: int) -> torch.Tensor:
        """Return the sum of a tensor over the keys of this head's group, (dim,) in float32."""
        keys = torch.Tensor.detach(tensor_bhsd)[self.batch, self.q_head // group]
        return keys.float().sum(0) if keys.element_size() == 1 else keys.sum(0, dtype=torch.float32)

    def of(self, tensor_bhsd: torch.Tensor) -> torch.Tensor:
        """Return a copy of the rows, (n, dim), made by one kernel on the current stream."""
        rows = torch.Tensor.detach(tensor_bhsd)[self.batch, self.q_head]
        if rows.element_size() == 1:
            # Codes cannot be indexed on every device; their bits can.
            return rows.view(torch.uint8).index_select(0, self.rows).view(rows.dtype)
        return rows.index_select(0, self.rows)


@dataclass(frozen=True)
class Probe:
    """A few rows of one timed call's `out`, or dq.

    Attributes:
        place: which rows.
        rows: their numbers, or codes, (n, dim).
        state: how the inputs of the call differed from those of the seed.
        index: which call of its pass it was, from 1 on.
        sum_dv: the sum of dv over the keys of that head, (value_dim,); None for a forward.
    """

    place: Place
    rows: torch.Tensor
    state: State
    index: int
    sum_dv: torch.Tensor | None = None


@torch.no_grad()
def probe_errors(
    case: Case, seeded: Inputs, probes: Sequence[Probe], name: str, scale: float, usual: float
) -> list[float]:
    """Return the relative error of each probe, infinite if its rows are not finite.

    Args:
        case: the problem.
        seeded: the inputs of the seed.
        probes: of one pass.
        name: `out` or `dq`.
        scale: the factor of rows that are codes.
        usual: the root mean square of the whole tensor (see `usual_size`). Rows that nearly vanish beside it are not
            judged by their own norm.
    """
    numbers = seeded.numbers()
    errors: list[float] = []
    for some in _together(probes, case.kv_len):
        wanted = _rows(case, numbers, some, name)
        found = torch.stack([probe.rows.float() for probe in some]) * scale
        norms = wanted.flatten(1).norm(dim=-1).clamp(min=_LEAST * usual * wanted[0].numel() ** 0.5)
        errors += ((found - wanted).flatten(1).norm(dim=-1) / norms).tolist()
    return [error if math.isfinite(error) else math.inf for error in errors]


def _together(probes: Sequence[Probe], kv_len: int) -> Iterator[Sequence[Probe]]:
    step = max(1, _KEYS // kv_len)
    for begin in range(0, len(probes), step):
        yield probes[begin : begin + step]


def _rows(case: Case, numbers: Inputs, probes: Sequence[Probe], name: str) -> torch.Tensor:
    """Return what the rows of `out` or `dq` should be, (probes, n, dim) in float32.

    Signs of channels of k act on scores as those of q do, those of v on the output, and signs of rows on scores and
    weights: keys and values are not copied.
    """
    device, group = numbers.q_bhsd.device, case.q_heads // case.kv_heads
    places = [(probe.place.batch, probe.place.q_head, probe.place.q_head // group) for probe in probes]
    batch, q_head, kv_head = torch.tensor(places, device=device).unbind(-1)
    rows = torch.stack([probe.place.rows for probe in probes])

    def signs(key: str, length: int) -> torch.Tensor:
        return sign_factors([probe.state.signs.get(key, 0) for probe in probes], length, device)

    of_q, of_k, of_v, of_d_out = (
        signs(of, dim).unsqueeze(1)
        for of, dim in zip(("q", "k", "v", "d_out"), (case.head_dim,) * 2 + (case.value_dim,) * 2, strict=True)
    )
    rows_of_k, rows_of_v = (signs(rows_of(of), case.kv_len).unsqueeze(1) for of in ("k", "v"))
    at = batch[:, None], q_head[:, None], rows
    k, v = (tensor.detach()[batch, kv_head].float() for tensor in (numbers.k_bhsd, numbers.v_bhsd))
    q = numbers.q_bhsd.detach()[at].float() * (of_q * of_k)
    scores, slope = capped(case, q @ k.mT * (rows_of_k * case.head_dim**-0.5))
    first, last = seen_keys(case, rows)
    key = torch.arange(case.kv_len, device=device)
    hidden = (key < first[..., None]) | (key > last[..., None])
    weights = torch.softmax(scores.masked_fill_(hidden, float("-inf")), -1).nan_to_num_(0.0)
    out = (weights * rows_of_v) @ v
    if name == "out":
        return out.mul_(of_v)
    negated = torch.tensor([-1.0 if probe.state.negated else 1.0 for probe in probes], device=device)
    by_row = signs(rows_of("d_out"), case.q_len).gather(-1, rows) * negated[:, None]
    # In the basis in which v has the numbers of the seed.
    d_out = numbers.d_out_bhsd[at].float() * (of_d_out * of_v) * by_row[..., None]
    d_scores = weights * (d_out @ v.mT * rows_of_v - (d_out * out).sum(-1, keepdim=True))
    d_scores = d_scores if slope is None else d_scores * slope
    return ((d_scores * rows_of_k) @ k).mul_(of_k * case.head_dim**-0.5)


@torch.no_grad()
def sum_errors(case: Case, seeded: Inputs, probes: Sequence[Probe], scale: float) -> list[float]:
    """Return the relative error of each backward's sum of dv over the keys, infinite if it is not finite.

    It tells a dv that was kept (attn_exp/attention/head_sums.py). `scale` is the factor of dv that is codes.
    """
    device, group = seeded.q_bhsd.device, case.q_heads // case.kv_heads
    first, last = seen_keys(case, torch.arange(case.q_len, device=device))
    by_row = sign_factors([probe.state.signs[rows_of("d_out")] for probe in probes], case.q_len, device)
    by_row = by_row * (first <= last)
    by_channel = sign_factors([probe.state.signs["d_out"] for probe in probes], case.value_dim, device)
    d_out = seeded.numbers().d_out_bhsd.unflatten(1, (case.kv_heads, group))
    errors = []
    # One by one: the queries of a group may be many.
    for index, probe in enumerate(probes):
        assert probe.sum_dv is not None
        of_queries = d_out[probe.place.batch, probe.place.q_head // group].float()
        sums, size = sums_of_dv(of_queries[None], by_row[index : index + 1])
        wanted = sums[0] * by_channel[index] * (-1.0 if probe.state.negated else 1.0)
        errors.append((probe.sum_dv * scale - wanted).norm() / size[0])
    found = torch.stack(errors).tolist()
    return [error if math.isfinite(error) else math.inf for error in found]


def usual_size(tensor: torch.Tensor) -> float:
    """Return the root mean square of a reference, or 1.0, the inputs' own, where it vanishes."""
    size = float(tensor.square().mean().sqrt())
    return size if size > VANISHING else 1.0


def allowed_error(relative: float) -> float:
    """Return the error that a probe may have where whole tensors may have `relative`, infinite if that is."""
    return max(allowed_sum(relative), 2 * relative) if math.isfinite(relative) else math.inf
