"""The errors of parts of a tensor: of a row and a tile by their own norm."""

from dataclasses import dataclass, replace

import torch

from attn_exp.attention.sampling import Places

# Rows of a tile.
TILE = 64
_BHSD = 4
_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Tolerance:
    """Bounds on a `TensorError`; None for errors that are not checked.

    Attributes:
        relative: on `relative`.
        worst_row: on `worst_row`.
        own_row: on `own_row`.
        tile: on `worst_tile`.
        small: in `own_row` and `worst_tile`, rows of a smaller share of the typical norm are judged by this share.
    """

    relative: float
    worst_row: float
    own_row: float | None = None
    tile: float | None = None
    small: float = 1.0

    def times(self, factor: float) -> "Tolerance":
        """Return wider bounds on errors."""
        parts = {name: getattr(self, name) for name in ("relative", "worst_row", "own_row", "tile")}
        return replace(self, **{name: factor * bound for name, bound in parts.items() if bound is not None})


@dataclass(frozen=True)
class Unit:
    """The scale of errors if a reference vanishes, as dq and dk do if a query sees one key.

    Attributes:
        least: the root mean square below which a reference is rounding noise.
        scale: the magnitude that errors of elements are then relative to.
    """

    least: float
    scale: float


# A reference whose root mean square is a smaller share of what its inputs could give is rounding noise.
VANISHING = 1e-5
# For inputs of unit scale.
UNIT = Unit(least=VANISHING, scale=1.0)


@dataclass(frozen=True)
class Rows:
    """Errors and norms of rows, (heads, rows) in float64 on the CPU; tensors without heads count as one head.

    They are few numbers: launching many small operators on a GPU takes longer than computing them on a CPU.

    Attributes:
        error: |x - ref|.
        norm: |ref|.
        typical: the root-mean-square norm of all rows.
        largest: the largest error of an element.
    """

    error: torch.Tensor
    norm: torch.Tensor
    typical: float
    largest: float


def of_rows(rows: Rows, small: float, sizes: torch.Tensor | None = None) -> torch.Tensor:
    """Return each row's error by its own norm, (heads, rows); `small` is that of `Tolerance`.

    With `sizes` (heads or 1, rows) by the norm that rows of these sizes have on average, if it is larger.
    """
    norm = rows.norm.clamp(min=small * rows.typical)
    if sizes is not None:
        # The norms that rows of these sizes have on average.
        norm = torch.maximum(norm, sizes * (rows.typical / sizes.square().mean().clamp(min=_TINY).sqrt()))
    return rows.error / norm


def of_tiles(rows: Rows, small: float, tile: int) -> torch.Tensor:
    """Return the error of each tile of `tile` rows by its own norm, (heads, tiles)."""
    both = torch.stack([rows.error, rows.norm.clamp(min=small * rows.typical)]).square()
    missing = -both.shape[-1] % tile
    error, of = torch.nn.functional.pad(both, (0, missing)).unflatten(-1, (-1, tile)).sum(-1)
    share: torch.Tensor = error / of
    return share.sqrt()


def place_of_row(field: str, at: int, shape: tuple[int, ...], places: Places | None, tile: int) -> str:
    """Return where row or tile `at` of a field of `TensorError` is, with {} for the tensor's name."""
    if len(shape) != _BHSD:
        return "a tile of {}" if field == "worst_tile" else f"row {at} of {{}}"
    heads, length = shape[1:3]
    of_head = -(-length // tile) if field == "worst_tile" else length
    head, first = at // of_head, at % of_head
    last = first
    if field == "worst_tile":
        first, last = first * tile, min(first * tile + tile, length) - 1
    if places is not None:
        first, last = int(places.rows[head, first]), int(places.rows[head, last])
        head, heads = int(places.heads[head]), places.heads_of_batch_row
    rows = f"rows {first} to {last}" if last > first else f"row {first}"
    return f"{rows} of {{}} in head {head % heads} of batch row {head // heads}"
