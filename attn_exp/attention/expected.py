"""What a right result is: the reference, what errors are relative to, and how large they may be."""

import math
from dataclasses import dataclass, field, replace

import torch

from attn_exp.attention.biases import alibi_slopes
from attn_exp.attention.error import judged_error
from attn_exp.attention.error_parts import TILE, UNIT, VANISHING, Tolerance, Unit
from attn_exp.attention.formula import masked, seen_keys
from attn_exp.attention.inputs import Inputs
from attn_exp.attention.reference import reference_and_largest_score, sink_gradients
from attn_exp.attention.sampled import sampled_reference
from attn_exp.attention.sampling import GROUP, Places, draw_heads, worth_sampling
from attn_exp.attention.tolerance import measured_tolerances
from attn_exp.core.case import NORMAL, Case
from attn_exp.core.judged import TensorError

# A reference is noise below this over the number of keys, if these are so many that it is below `VANISHING`.
VANISHING_OF_KEYS = 1e-2
# What d_sink may be off by in units of the dtype, at least, and one head of it relative to that: its terms have random
# signs, and two products that are rounded.
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
        units: what errors are relative to if a tensor vanishes.
        largest_score: the largest magnitude of a score that the reference saw, scaled and before a softcap; None for a
            block.
        row_sizes: (heads or 1, n) on the CPU, how the norms of a tensor's rows differ on average, up to a factor; no
            entry where they do not.
    """

    tensors: dict[str, torch.Tensor]
    tolerances: dict[str, Tolerance]
    places: dict[str, Places] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    units: dict[str, Unit] = field(default_factory=dict)
    largest_score: float | None = None
    row_sizes: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def sampled(self) -> bool:
        """Whether only drawn rows of some tensor are judged."""
        return bool(self.places)

    @property
    def leaves_heads_out(self) -> bool:
        """Whether gradients of keys are known of only some heads."""
        return "dk" in self.places and len(self.places["dk"].heads) < math.prod(self.shape("dk")[:2])

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

    def typical_norm(self, name: str) -> float:
        """Return the root mean square norm of a tensor's rows; where it vanishes, what errors are then relative to."""
        tensor, unit = self.tensors[name], self.units.get(name, UNIT)
        size = tensor.square().mean().sqrt().item()
        return (size if size > unit.least else unit.scale) * math.sqrt(tensor.shape[-1])

    def judge(self, name: str, tensor: torch.Tensor, scale: float = 1.0) -> TensorError:
        """Return the error of a backend's whole tensor and what is allowed; `scale` is the factor of codes.

        Only the rows in `places` are read.

        Raises:
            ValueError: the shape is another.
        """
        if tuple(tensor.shape) != self.shape(name):
            raise ValueError(f"the shape is {tuple(tensor.shape)}, not {self.shape(name)}")
        places, bounds, unit = self.places.get(name), self.tolerances[name], self.units.get(name, UNIT)
        rows, tile = (tensor, TILE) if places is None else (places.of(tensor), TILE // GROUP)
        sizes = self.row_sizes.get(name)
        return judged_error(rows, self.tensors[name], bounds, scale, places=places, tile=tile, unit=unit, sizes=sizes)


def expected(
    case: Case,
    inputs: Inputs,
    *,
    with_gradients: bool,
    sampled: bool = False,
    tolerances: dict[str, Tolerance] | None = None,
) -> Expected:
    """Return the reference of a case with its tolerances.

    Args:
        case: the problem.
        inputs: its tensors.
        with_gradients: whether `dq`, `dk` and `dv` are asked for.
        sampled: compute only rows that are drawn anew (attn_exp/attention/sampling.py), if the case is large enough
            that this is much cheaper.
        tolerances: those of an earlier reference of the same case, whose inputs had the same distribution; by default
            they are measured.
    """
    known = _expected(case, inputs, with_gradients=with_gradients, sampled=sampled, tolerances=tolerances)
    if case.sink and with_gradients and inputs.kind == NORMAL:
        return _with_sinks(case, inputs, known)
    return known


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


def _expected(
    case: Case,
    inputs: Inputs,
    *,
    with_gradients: bool,
    sampled: bool,
    tolerances: dict[str, Tolerance] | None,
) -> Expected:
    bounds = measured_tolerances(case, inputs, with_gradients=with_gradients) if tolerances is None else tolerances
    if sampled and worth_sampling(case.batch * case.q_heads, case.q_len, case.kv_len):
        part = sampled_reference(case, inputs, with_gradients=with_gradients)
        whole = dict(zip(("out", "dq", "dk", "dv"), (inputs.d_out_bhsd, *inputs.qkv), strict=True))
        shapes = {name: tuple(whole[name].shape) for name in part.places}
        rows = part.places["out"].rows.cpu()
        units, sizes = _units(case, inputs), _row_sizes(case, inputs, rows, with_gradients=with_gradients)
        return Expected(part.tensors, bounds, part.places, shapes, units, part.largest_score, sizes)
    tensors, largest = reference_and_largest_score(case, inputs, with_gradients=with_gradients)
    sizes = _row_sizes(case, inputs, torch.arange(case.q_len)[None], with_gradients=with_gradients)
    return Expected(tensors, bounds, units=_units(case, inputs), largest_score=largest, row_sizes=sizes)


def _row_sizes(case: Case, inputs: Inputs, rows: torch.Tensor, *, with_gradients: bool) -> dict[str, torch.Tensor]:
    """Return the sizes of these rows of dq, (heads or 1, n), where queries see different numbers of normal keys.

    A row's norm goes with the inverse root of the keys that its query sees, and so does its rounding. But where a query
    sees two or three keys, d_scores may cancel: little is left of the row then, and its rounding is as large as ever.
    Under a causal mask it was up to 0.2 of the tensor's typical norm at 8,192 tokens and 0.6 at 131,072, and at most
    0.02 of the row's size (60,000 heads of the fused formula).
    """
    if not with_gradients or inputs.kind != NORMAL or not masked(case):
        return {}
    first, last = seen_keys(case, rows)
    keys = last - first + 1
    if case.alibi:
        # Keys farther away than some multiples of 1 / slope have no weight. (heads, n)
        several = 2 / torch.tensor(alibi_slopes(case.q_heads), dtype=torch.float64).repeat(case.batch)
        keys = torch.minimum(keys.double(), several[:, None].clamp(min=2.0))
    # The only weight of a query that sees one key is 1, and dq vanishes.
    return {"dq": keys.clamp(min=2).double().rsqrt().masked_fill_(keys < 2, 0.0)}


def _units(case: Case, inputs: Inputs) -> dict[str, Unit]:
    """Return what errors are relative to where a reference vanishes: products of the inputs' root mean squares.

    There dq and dk are differences of products of d_out and v, channel by channel: where one is large in the channels
    in which the other is small, their products are not. A gradient of a key is a sum over queries. The gradient of a
    key among many is small without being noise.
    """
    numbers = inputs.numbers()
    tensors = (*numbers.qkv, numbers.d_out_bhsd)
    by_channel = [one.detach().float().square().mean((0, 1, 2)) for one in tensors]
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
