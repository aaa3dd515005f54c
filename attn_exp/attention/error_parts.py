"""The errors of parts of a tensor: of a row and a tile by their own norm, and of the mean along the reference."""

from dataclasses import dataclass

import torch

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
# A row of less than this share of the typical norm is small.
_SMALL = 0.5
_BHSD = 4


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
        small: in `own_row` and `worst_tile`, rows of a smaller share of the typical norm are judged by this share.
    """

    relative: float
    worst_row: float
    own_row: float | None = None
    tile: float | None = None
    bias: float | None = None
    least_row: float | None = None
    small: float = 1.0


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
    """What a comparison knows of each row, (heads, rows); tensors without heads have one.

    Attributes:
        error: |x - ref|.
        norm: |ref|.
        along: <x - ref, ref>.
        typical: the root-mean-square norm of all rows, without dimensions.
        largest: the largest error of an element, without dimensions.
    """

    error: torch.Tensor
    norm: torch.Tensor
    along: torch.Tensor
    typical: torch.Tensor
    largest: torch.Tensor


def own_errors(rows: Rows, small: float, tile: int) -> tuple[float, int, float, int]:
    """Return the worst row's error by its own norm, this row, the worst tile's error, and this tile, counted flat."""
    norm = rows.norm.clamp(min=small * rows.typical.item())
    own = rows.error / norm
    missing = -rows.norm.shape[-1] % tile
    error, of = (
        torch.nn.functional.pad(one.square(), (0, missing)).unflatten(-1, (-1, tile)).sum(-1)
        for one in (rows.error, norm)
    )
    of_tile = (error / of).sqrt()
    return own.max().item(), int(own.argmax()), of_tile.max().item(), int(of_tile.argmax())


def bias_error(rows: Rows) -> tuple[float, float, int | None] | None:
    """Return the bias that is furthest beyond its noise, what its noise explains, and the head, None for all together.

    A row counts by the inverse square of its error: where all keys of a query are few, its norm is large and so is its
    rounding. The noise of a mean is measured on how much its rows differ. None if there are too few rows.
    """
    error, norm, along = (one.double() for one in (rows.error, rows.norm, rows.along))
    if norm.numel() < _LEAST_ROWS or norm.square().sum() < _LEAST_NORM * norm.numel() * rows.typical.double() ** 2:
        return None
    usual = error.square().sum() / norm.square().sum()
    weight = 1 / (error.square() + _LEAST_NOISE**2 * usual * norm.square()).clamp(min=torch.finfo(torch.float64).tiny)
    heads = [(along, norm, weight)] if norm.shape[-1] >= _LEAST_ROWS else []
    biases, noises = [], []
    for one, of, by in [*heads, tuple(part.reshape(1, -1) for part in (along, norm, weight))]:
        total = (by * of.square()).sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        bias = (by * one).sum(-1, keepdim=True) / total
        noises.append((by * (one - bias * of.square())).square().sum(-1).sqrt() / total.squeeze(-1))
        biases.append(bias.squeeze(-1))
    bias, noise = torch.cat(biases), _STANDARD_ERRORS * torch.cat(noises)
    worst = int((bias.abs() - noise).argmax())
    return bias[worst].item(), noise[worst].item(), worst if worst < len(bias) - 1 else None


def least_row(rows: Rows) -> tuple[float, int]:
    """Return the least <x, ref> / <ref, ref> of a row that is not small, 1 if it is right, and the row counted flat."""
    follows = 1 + rows.along / rows.norm.square().clamp(min=torch.finfo(rows.norm.dtype).tiny)
    follows = follows.masked_fill(rows.norm < _SMALL * rows.typical, 1.0)
    return follows.min().item(), int(follows.argmin())


def place_of_row(field: str, at: int, shape: tuple[int, ...], places: torch.Tensor | None, tile: int) -> str:
    """Return where row, tile or head `at` of a field of `TensorError` is, with {} for the tensor's name."""
    if len(shape) != _BHSD:
        return "{}" if field == "bias" else "a tile of {}" if field == "worst_tile" else f"row {at} of {{}}"
    _, heads, length, _ = shape
    if field == "bias":
        return f"head {at % heads} of {{}} in batch row {at // heads}"
    of_head = -(-length // tile) if field == "worst_tile" else length
    head, first = at // of_head, at % of_head
    last = first
    if field == "worst_tile":
        first, last = first * tile, min(first * tile + tile, length) - 1
    if places is not None:
        of = places[head // heads, head % heads]
        first, last = int(of[first]), int(of[last])
    rows = f"rows {first} to {last}" if last > first else f"row {first}"
    return f"{rows} of {{}} in head {head % heads} of batch row {head // heads}"
