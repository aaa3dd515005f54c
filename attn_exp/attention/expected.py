"""The expected result: the reference, the scale of its errors, and how large they may be."""

import math
from dataclasses import dataclass, field, replace

import torch

from attn_exp.attention.error import TILE, UNIT, VANISHING, Tolerance, Unit, judged_error, ulps_of
from attn_exp.attention.formula import seen_keys
from attn_exp.attention.inputs import Inputs
from attn_exp.attention.reference import reference_and_largest_score, sink_gradients
from attn_exp.attention.sampled import sampled_reference
from attn_exp.attention.sampling import GROUP, Places, draw_heads, worth_sampling
from attn_exp.attention.scores import alibi_slopes
from attn_exp.attention.tolerance import measured_tolerances
from attn_exp.core.case.case import NORMAL, Case
from attn_exp.core.record.checked import TensorError

# A reference is noise below this over the number of keys, if these are so many that it is below `VANISHING`.
VANISHING_OF_KEYS = 1e-2
# Tolerances of d_sink: in units of the dtype, the least, and of one head relative to that. Its terms have random signs,
# and two products that are rounded.
_SINK_UNITS, _LEAST_SINK, _OF_SINK_HEAD = 8.0, 1e-4, 4.0
# The dimensions of an output of attention without a block.
_BHSD = 4


@dataclass(frozen=True)
class Expected:
    """The reference of a case in float32, whole or at the rows that were drawn, and its tolerances.

    Attributes:
        tensors: `out`, and with gradients `dq`, `dk`, `dv`; a block's have other names. Whole, or with an entry in
            `places` only these rows, (1, heads, n, dim).
        tolerances: by the same names.
        places: the rows that were drawn of a tensor.
        shapes: those of the whole tensors in `places`.
        units: the scales of errors if a tensor vanishes.
        largest_score: the largest magnitude of a score that the reference saw, scaled and before a softcap; None for a
            block.
        row_sizes: (heads or 1, n) on the CPU, the average norms of a tensor's rows, up to a factor; no entry if they
            are equal.
    """

    tensors: dict[str, torch.Tensor]
    tolerances: dict[str, Tolerance]
    places: dict[str, Places] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    units: dict[str, Unit] = field(default_factory=dict)
    largest_score: float | None = None
    row_sizes: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Return how many rows of all tensors are looked at, over all heads of the batch."""
        return sum(tensor[..., 0].numel() for tensor in self.tensors.values())

    @property
    def rows_of(self) -> int:
        """Return how many rows all tensors have."""
        return sum(math.prod(self.shape(name)[:-1]) for name in self.tensors)

    @property
    def heads(self) -> int:
        """Return how many heads of `out` are looked at, in all rows of the batch; 0 for a block, which has none."""
        out = self.tensors["out"]
        return out.shape[0] * out.shape[1] if out.ndim == _BHSD else 0

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        return self.shapes.get(name) or tuple(self.tensors[name].shape)

    def judge(self, name: str, tensor: torch.Tensor, scale: float = 1.0) -> TensorError:
        """Return the error of a backend's whole tensor and what is allowed; `scale` is the factor of codes.

        Only the rows in `places` are read.
        """
        if tuple(tensor.shape) != self.shape(name):
            raise ValueError(f"the shape is {tuple(tensor.shape)}, not {self.shape(name)}")
        places = self.places.get(name)
        return self.judge_rows(name, tensor if places is None else places.of(tensor), scale)

    def judge_rows(self, name: str, rows: torch.Tensor, scale: float = 1.0) -> TensorError:
        """Return the same of the rows in `places`, (1, heads, n, dim), or of a whole tensor where there is no entry."""
        places, bounds, unit = self.places.get(name), self.tolerances[name], self.units.get(name, UNIT)
        whole = places is None or places.rows.shape[-1] == self.shape(name)[2]
        tile, sizes = TILE if whole else TILE // GROUP, self.row_sizes.get(name)
        expected = self.tensors[name]
        error = judged_error(rows, expected, bounds, scale, places=places, tile=tile, unit=unit, sizes=sizes)
        return error if expected.dtype != torch.float64 else replace(error, ulps=ulps_of(rows, expected, scale))


def expected(
    case: Case,
    inputs: Inputs,
    *,
    with_gradients: bool,
    sampled: bool = False,
    tolerances: dict[str, Tolerance] | None = None,
) -> Expected:
    """Return the reference of a case with its tolerances.

    With `sampled` only rows that are drawn anew (attn_exp/attention/sampling.py), if the case is large enough that this
    is much cheaper. `tolerances` are those of an earlier reference of the same case, whose inputs had the same
    distribution; by default they are measured.
    """
    bounds = measured_tolerances(case, inputs, with_gradients=with_gradients) if tolerances is None else tolerances
    if sampled and worth_sampling(case.batch * case.q_heads, case.q_len, case.kv_len):
        known = expected_at(case, inputs, None, with_gradients=with_gradients, tolerances=bounds)
    else:
        tensors, largest = reference_and_largest_score(case, inputs, with_gradients=with_gradients)
        sizes = _row_sizes(case, inputs, torch.arange(case.q_len)[None], with_gradients=with_gradients)
        known = Expected(tensors, bounds, units=_units(case, inputs), largest_score=largest, row_sizes=sizes)
    if case.sink and with_gradients and inputs.kind == NORMAL:
        return _with_sinks(case, inputs, known)
    return known


def expected_at(
    case: Case,
    inputs: Inputs,
    places: tuple[Places, Places] | None,
    *,
    with_gradients: bool,
    tolerances: dict[str, Tolerance],
) -> Expected:
    """Return the reference at rows of queries and keys, which are drawn from all heads if they are None."""
    part = sampled_reference(case, inputs, with_gradients=with_gradients, places=places)
    drawn = part.places["out"]
    heads = None if places is None else drawn.heads.cpu()
    sizes = _row_sizes(case, inputs, drawn.rows.cpu(), heads=heads, with_gradients=with_gradients)
    whole = dict(zip(("out", "dq", "dk", "dv"), (inputs.d_out_bhsd, *inputs.qkv), strict=True))
    shapes = {name: tuple(whole[name].shape) for name in part.places}
    return Expected(part.tensors, tolerances, part.places, shapes, _units(case, inputs), part.largest_score, sizes)


def _with_sinks(case: Case, inputs: Inputs, known: Expected) -> Expected:
    """Add `d_sink`, of as many heads as are affordable; on hard values nobody knows what its terms may be off by."""
    scores = case.batch * (case.q_heads // case.kv_heads) * case.q_len * case.kv_len
    kv_heads = draw_heads(case.kv_heads, scores, inputs.q_bhsd.device.type)
    gradient, usual = sink_gradients(case, inputs, kv_heads)
    group = case.q_heads // case.kv_heads
    heads = (kv_heads[:, None] * group + torch.arange(group)).flatten().to(gradient.device)
    places, shapes = dict(known.places), dict(known.shapes)
    if len(kv_heads) < case.kv_heads:
        places["d_sink"] = Places(heads, torch.zeros_like(heads)[:, None], case.q_heads)
        shapes["d_sink"] = (1, case.q_heads, 1, 1)
    relative = max(_SINK_UNITS * torch.finfo(getattr(torch, case.dtype)).eps, _LEAST_SINK)
    return replace(
        known,
        tensors=known.tensors | {"d_sink": gradient},
        tolerances=known.tolerances | {"d_sink": Tolerance(relative, _OF_SINK_HEAD * relative)},
        places=places,
        shapes=shapes,
        # The sum of a few heads may cancel.
        units=known.units | {"d_sink": Unit(usual, usual)},
    )


def _row_sizes(
    case: Case, inputs: Inputs, rows: torch.Tensor, *, with_gradients: bool, heads: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Return the sizes of these rows of dq, (heads or 1, n), where queries see different numbers of normal keys.

    A row's norm and rounding scale with the inverse root of the number of keys that its query sees. But with two or
    three keys d_scores may cancel, and little is left of the row but its rounding. Under a causal mask this reached 0.6
    of the tensor's typical norm, and at most 0.02 of the row's size (60,000 heads of the fused formula).
    """
    if not with_gradients or inputs.kind != NORMAL or case.dense:
        return {}
    first, last = seen_keys(case, rows)
    keys = last - first + 1
    if case.alibi:
        # Keys farther away than some multiples of 1 / slope have no weight. (heads, n)
        several = 2 / torch.tensor(alibi_slopes(case.q_heads), dtype=torch.float64).repeat(case.batch)
        several = several if heads is None else several[heads]
        keys = torch.minimum(keys.double(), several[:, None].clamp(min=2.0))
    # The only weight of a query that sees one key is 1, and dq vanishes.
    return {"dq": keys.clamp(min=2).double().rsqrt().masked_fill_(keys < 2, 0.0)}


def _units(case: Case, inputs: Inputs) -> dict[str, Unit]:
    """Return the scales of errors if a reference vanishes: products of the inputs' root mean squares.

    Then dq and dk are differences of products of d_out and v, channel by channel. These are small if d_out is large in
    the channels in which v is small. A gradient of a key is a sum over queries. The gradient of a key among many is
    small without being noise.
    """
    numbers = inputs.numbers()
    tensors = (*numbers.qkv, numbers.d_out_bhsd)
    by_channel = [tensor.detach().float().square().mean((0, 1, 2)) for tensor in tensors]
    means = torch.stack([one.mean() for one in (*by_channel, by_channel[2] * by_channel[3])])
    # Hard values may be all zeros.
    q, k, v, d_out, product = (root or 1.0 for root in means.sqrt().tolist())
    summed = max(1.0, case.q_heads * case.q_len / (case.kv_heads * case.kv_len)) ** 0.5
    terms = max(case.head_dim, case.value_dim) ** 0.5
    share = min(VANISHING, VANISHING_OF_KEYS / case.most_keys)
    scales = {"out": v, "dq": k * product, "dk": q * product * summed, "dv": d_out * summed}
    factor = {"out": 1.0, "dq": terms, "dk": terms, "dv": 1.0}
    # A tensor of zeros gives no scale.
    return {name: Unit(share * scale, factor[name] * scale or 1.0) for name, scale in scales.items()}
