"""The errors of parts of a tensor: of a row and a tile by their own norm, and of the mean along the reference."""

import math
from dataclasses import dataclass

import torch

from attn_exp.attention.sampling import Places

# Rows of a tile.
TILE = 64
# From this many rows on the noise of their mean is known. It may reach so many standard errors, beside
# `Tolerance.bias`.
_LEAST_ROWS = 32
_STANDARD_ERRORS = 8.0
# Rows that rounding hit by less than this share of the usual do not count for more.
_LEAST_NOISE = 0.1
# A reference with less than this share of its scale squared vanishes, and errors have no direction.
_LEAST_NORM = 1e-2
# A row of less than this share of the typical norm is small; of less than the other, it may be rounded to zeros.
_SMALL, _LEAST_OF_TYPICAL = 0.5, 1e-4
# Of two keys whose d_out v are equal in bf16 no gradient is left; they may differ by some units, of 1/128 each.
_CANCELLED = 0.05
# Rows of a smaller share of the typical norm weigh as if they had this one.
_LEAST_WEIGHED = 0.1
# Rows at one position of all heads are judged together, with their neighbours if there are fewer heads than this. What
# vanishes beside the others counts as this share of the typical norm.
_POOLED, _LEAST_POOLED = 8, 0.02
_BHSD = 4
_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Tolerance:
    """Bounds on a `TensorError`; None for what is not checked.

    Attributes:
        relative: on `relative`.
        worst_row: on `worst_row`.
        own_row: on `own_row`.
        tile: on `worst_tile`.
        bias: on the magnitude of `bias`, beside its noise.
        least_row: the least `least_row`.
        least_norm: the norm from which on also a small row must not be zeros.
        position: on `worst_position`.
        position_bias: on `position_bias`.
        small: in `own_row` and `worst_tile`, rows of a smaller share of the typical norm are judged by this share.
        usual: on |x - ref| / |ref| of a head, unless it is off as formulas are that round scores
            (attn_exp/attention/rounding.py).
        channel: on |x - ref| / |ref| of a channel, where channels differ (attn_exp/attention/channels.py).
        query: on |x - ref| / |ref| of a row of dq relative to its row of d_out (attn_exp/attention/small_gradients.py).
    """

    relative: float
    worst_row: float
    own_row: float | None = None
    tile: float | None = None
    bias: float | None = None
    least_row: float | None = None
    least_norm: float = math.inf
    position: float | None = None
    position_bias: float | None = None
    small: float = 1.0
    usual: float | None = None
    channel: float | None = None
    query: float | None = None


@dataclass(frozen=True)
class Unit:
    """What errors are relative to where a reference vanishes, as dq and dk do where a query sees one key.

    Attributes:
        least: the root mean square below which a reference is rounding noise.
        scale: what errors of elements are then relative to.
    """

    least: float
    scale: float


# A reference whose root mean square is a smaller share of what its inputs could give is rounding noise.
VANISHING = 1e-5
# For inputs of unit scale.
UNIT = Unit(least=VANISHING, scale=1.0)


@dataclass(frozen=True)
class Rows:
    """What a comparison knows of each row, (heads, rows) in float64 on the CPU; tensors without heads have one.

    They are few numbers, and a GPU takes longer to be told of many small operators than a CPU to compute them.

    Attributes:
        error: |x - ref|.
        norm: |ref|.
        along: <x - ref, ref>.
        typical: the root-mean-square norm of all rows.
        largest: the largest error of an element.
    """

    error: torch.Tensor
    norm: torch.Tensor
    along: torch.Tensor
    typical: float
    largest: float


def weighed_rows(name: str, tensor: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return rows of `out` over the norms of the reference's, and other tensors as they are.

    Where a query sees few keys the norm of its output is large, and under a causal mask hides the error of later rows.
    """
    if name != "out":
        return tensor
    norm = reference.norm(dim=-1, keepdim=True)
    weighed: torch.Tensor = tensor / norm.clamp(min=_LEAST_WEIGHED * float(norm.square().mean().sqrt()) + _TINY)
    return weighed


def of_rows(rows: Rows, small: float, sizes: torch.Tensor | None = None) -> torch.Tensor:
    """Return each row's error by its own norm, (heads, rows); `small` is that of `Tolerance`.

    With `sizes` (heads or 1, rows) by the norm that rows of these sizes have on average, if it is larger.
    """
    norm = rows.norm.clamp(min=small * rows.typical)
    return rows.error / (norm if sizes is None else torch.maximum(norm, _usual_norms(rows, sizes)))


def _usual_norms(rows: Rows, sizes: torch.Tensor) -> torch.Tensor:
    """Return the norms that rows of these sizes have on average."""
    return sizes * (rows.typical / sizes.square().mean().clamp(min=_TINY).sqrt())


def of_tiles(rows: Rows, small: float, tile: int) -> torch.Tensor:
    """Return the error of each tile of `tile` rows by its own norm, (heads, tiles)."""
    both = torch.stack([rows.error, rows.norm.clamp(min=small * rows.typical)]).square()
    missing = -both.shape[-1] % tile
    error, of = torch.nn.functional.pad(both, (0, missing)).unflatten(-1, (-1, tile)).sum(-1)
    share: torch.Tensor = error / of
    return share.sqrt()


def follows(rows: Rows, least_norm: float, sizes: torch.Tensor | None = None) -> torch.Tensor:
    """Return <x, ref> / <ref, ref> of each row, (heads, rows): 1 if it is right, and for small rows but zeros.

    `sizes` is that of `of_rows`: where next to nothing of such a row is left, rounding may leave nothing.
    """
    share = 1 + rows.along / rows.norm.square().clamp(min=_TINY)
    # The difference of zeros and a row is that row.
    zeros = ((rows.error - rows.norm).abs() < 1e-6 * rows.norm) & (share.abs() < 1e-6)
    zeros &= (rows.norm > _LEAST_OF_TYPICAL * rows.typical) & (rows.norm > least_norm)
    if sizes is not None:
        zeros &= rows.norm > _CANCELLED * _usual_norms(rows, sizes)
    return share.masked_fill((rows.norm < _SMALL * rows.typical) & ~zeros, 1.0)


def of_positions(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the error of the rows at each position, pooled over heads, and how far they are off along the reference.

    A row of a norm of its own may be small by what cancels; those of several heads are not at once. A row that is
    scaled by a little is within rounding, but rounding seldom goes along the reference.

    Returns:
        |x - ref| / |ref| of all heads' rows at a position, and the root mean square of <x - ref, ref> / <ref, ref>;
        (positions,) each. With few heads a position is of several neighbours, counted from the end.
    """
    heads, count = rows.norm.shape
    several = pooled_rows(heads)
    share = rows.along / rows.norm.clamp(min=_LEAST_WEIGHED * rows.typical).square()
    parts = torch.stack([rows.error.square(), rows.norm.square(), share.square(), torch.ones_like(share)])
    padded = torch.nn.functional.pad(parts, (-count % several, 0)).unflatten(-1, (-1, several))
    error, norm, along, of = padded.sum((1, 3))
    off = error / norm.maximum(of * (_LEAST_POOLED * rows.typical) ** 2)
    return off.sqrt(), (along / of).sqrt()


def pooled_rows(heads: int) -> int:
    """Return how many neighbours are one position if there are so many heads in all rows of the batch."""
    return max(1, -(-_POOLED // heads))


@dataclass(frozen=True)
class Bias:
    """The mean errors along the reference, of each head and of all heads together, (heads + 1,) in float64.

    Attributes:
        mean: the biases.
        noise: what the noise of each explains.
    """

    mean: torch.Tensor
    noise: torch.Tensor

    @property
    def excess(self) -> torch.Tensor:
        """Return by how much each is beyond its noise."""
        return self.mean.abs() - self.noise


def biases(rows: Rows) -> Bias:
    """Return the mean errors along the reference.

    A row counts by the inverse square of its error: where all keys of a query are few, its norm is large and so is its
    rounding. The noise of a mean is measured on how much its rows differ. With too few rows, or a reference that
    vanishes, there is no bias, and its noise is infinite.
    """
    error, norm = rows.error.square(), rows.norm.square()
    of_all = float(norm.sum())
    usual = float(error.sum()) / max(of_all, _TINY)
    weight = 1 / (error + _LEAST_NOISE**2 * usual * norm).clamp(min=_TINY)
    weighted = weight * torch.stack([rows.along, norm])
    of_heads = torch.cat([weighted, weighted.square(), weighted[:1] * weighted[1:]]).sum(-1)
    along, norm, along_2, norm_2, product = torch.cat([of_heads, of_heads.sum(-1, keepdim=True)], -1)
    norm = norm.clamp(min=_TINY)
    mean = along / norm
    # The sum of (along - mean * norm)^2 of the rows.
    noise = _STANDARD_ERRORS * (along_2 - mean * (2 * product - mean * norm_2)).clamp(min=0).sqrt() / norm
    count = rows.norm.numel()
    if count < _LEAST_ROWS or of_all < _LEAST_NORM * count * rows.typical**2:
        noise[:] = math.inf
    if rows.norm.shape[-1] < _LEAST_ROWS:
        noise[:-1] = math.inf
    return Bias(mean, noise)


def place_of_row(field: str, at: int, shape: tuple[int, ...], places: Places | None, tile: int) -> str:
    """Return where row, tile or head `at` of a field of `TensorError` is, with {} for the tensor's name."""
    if len(shape) != _BHSD:
        return "{}" if field == "bias" else "a tile of {}" if field == "worst_tile" else f"row {at} of {{}}"
    batch, heads, length, _ = shape
    if field in ("worst_position", "position_bias"):
        pooled = pooled_rows(len(places.heads) if places is not None else batch * heads)
        last = (at + 1) * pooled - 1 - (-length % pooled)
        first = max(0, last - pooled + 1)
        if places is not None:
            first, last = int(places.rows[:, first].min()), int(places.rows[:, last].max())
        return f"rows {first} to {last} of {{}} in all heads" if last > first else f"row {first} of {{}} in all heads"
    of_head = 1 if field == "bias" else -(-length // tile) if field == "worst_tile" else length
    head, first = at // of_head, at % of_head
    last = first
    if field == "worst_tile":
        first, last = first * tile, min(first * tile + tile, length) - 1
    if places is not None:
        first, last = int(places.rows[head, first]), int(places.rows[head, last])
        head, heads = int(places.heads[head]), places.heads_of_batch_row
    if field == "bias":
        return f"head {head % heads} of {{}} in batch row {head // heads}"
    rows = f"rows {first} to {last}" if last > first else f"row {first}"
    return f"{rows} of {{}} in head {head % heads} of batch row {head // heads}"
