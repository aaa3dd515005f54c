"""The error of a backend's tensors against the float32 reference, and whether it is within the tolerance.

A norm over the whole tensor hides what is small, as a row or a tile. So rows and
tiles are also judged by themselves.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from attn_exp.attention.sampling import Places
from attn_exp.core.record.checked import TensorError, Ulps
from attn_exp.core.stats.student import student_t_975
from attn_exp.core.text import apart

# Rows of a tile.
TILE = 64
_BHSD = 4
_TINY = torch.finfo(torch.float64).tiny
# A reference whose root mean square is a smaller share of what its inputs could give is rounding noise.
VANISHING = 1e-5
_CHUNK = 1 << 26
_OF_WHOLE = ("relative", "worst_row", "max_abs")


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


def tensor_error(tensor: torch.Tensor, reference: torch.Tensor, scale: float = 1.0) -> TensorError:
    """Compare a tensor, codes times a scale, with its reference of the same shape.

    The comparison runs in the reference's precision, in slices of bounded memory.
    """
    rows = _by_row(tensor, reference, scale, UNIT)
    return TensorError(**_finite(_figures(rows, of_rows(rows, 1.0))))


def judged_error(
    tensor: torch.Tensor,
    reference: torch.Tensor,
    bounds: Tolerance,
    scale: float = 1.0,
    *,
    places: Places | None = None,
    tile: int = TILE,
    unit: Unit = UNIT,
    sizes: torch.Tensor | None = None,
) -> TensorError:
    """Return `tensor_error` with its bounds, and the other errors that `bounds` asks for.

    Args:
        tensor: the backend's tensor, or rows of it.
        reference: the expected values of the same shape.
        bounds: the allowed errors.
        scale: the factor of a tensor of codes.
        places: which rows these are, (1, heads, n, dim); None if the tensor is whole.
        tile: how many of these rows are in a tile.
        unit: the scale of errors if the reference vanishes.
        sizes: the average norms of rows, up to a factor. A row with a smaller norm is judged as if it had this one.
    """
    rows = _by_row(tensor, reference, scale, unit)
    parts = {"worst_row": of_rows(rows, 1.0, sizes)}
    allowed: dict[str, Any] = {"tolerance": bounds.relative, "row_tolerance": bounds.worst_row}
    if bounds.tile is not None:
        parts["worst_tile"] = of_tiles(rows, bounds.small, tile)
        allowed["tile_tolerance"] = bounds.tile
        if bounds.own_row is not None:
            parts["own_row"] = of_rows(rows, bounds.small)
            allowed["own_row_tolerance"] = bounds.own_row
    found = _finite(_figures(rows, **parts))
    if found["relative"] is None:
        return TensorError(
            **{name: found[name] for name in _OF_WHOLE},
            **{name: allowed[name] for name in ("tolerance", "row_tolerance")},
        )
    error = TensorError(**found, **allowed)
    if inaccuracy({"": error}) is None:
        return error
    where = {name: int(part.argmax()) for name, part in parts.items()}
    shape = tuple(tensor.shape)
    return replace(error, where={name: place_of_row(name, at, shape, places, tile) for name, at in where.items()})


def ulps_of(tensor: torch.Tensor, reference: torch.Tensor, scale: float = 1.0) -> Ulps | None:
    """Return the error of a tensor (batch, heads, n, dim) in units in the last place; heads are taken as independent.

    None if it is not finite, or vanishes.
    """
    root = reference.square().mean().sqrt().item()
    if not root or reference.ndim != _BHSD:
        return None
    # Not that of the next lower power of two: the same error would have two figures on both sides of one.
    unit = torch.finfo(tensor.dtype).eps * root
    squares, sums = [], []
    for found, right in zip(tensor.detach().flatten(0, 1), reference.flatten(0, 1), strict=True):
        off = (found.to(right.dtype) * scale - right) / unit
        squares.append(off.square().mean())
        sums.append((off * right.sign()).mean())
    by_head = torch.stack([torch.stack(squares), torch.stack(sums)])
    (square, mean), heads = by_head.mean(-1).tolist(), by_head.shape[-1]
    if not math.isfinite(square):
        return None
    rms = square**0.5
    if heads == 1:
        return Ulps(rms=rms, rms_half_width=None, mean=mean, mean_half_width=None)
    of_square, of_mean = (student_t_975(heads - 1) * by_head.std(-1) / heads**0.5).tolist()
    return Ulps(rms=rms, rms_half_width=of_square / (2 * rms or 1.0), mean=mean, mean_half_width=of_mean)


def inaccuracy(errors: dict[str, TensorError]) -> str | None:
    """Return a sentence that says which tensor is inaccurate and by how much, or None."""
    for name, error in errors.items():
        if error.relative is None or error.worst_row is None:
            return f"{name} has values that are not finite"
        of_row, of_own_row = error.where.get("worst_row", "a row of {}"), error.where.get("own_row", "a row of {}")
        for what, found, allowed in (
            ("{}", error.relative, error.tolerance),
            (of_row, error.worst_row, error.row_tolerance),
            (of_own_row, error.own_row, error.own_row_tolerance),
            (error.where.get("worst_tile", "a tile of {}"), error.worst_tile, error.tile_tolerance),
        ):
            if found is not None and allowed is not None and found > allowed:
                several = what.startswith("rows ")
                off, most = apart(found, allowed)
                return (
                    f"{what.format(name)} {'are' if several else 'is'} off by {off} of {'their' if several else 'its'} "
                    f"norm, allowed is {most}"
                )
    return None


def _figures(rows: Rows, worst_row: torch.Tensor, **parts: torch.Tensor) -> dict[str, float]:
    """Return the fields of a `TensorError`: a part's is that of its worst place."""
    relative = float(rows.error.norm()) / (rows.typical * rows.norm.numel() ** 0.5)
    figures = {"relative": relative, "worst_row": float(worst_row.amax()), "max_abs": rows.largest}
    return figures | {name: float(part.amax()) for name, part in parts.items()}


def _finite(figures: dict[str, float]) -> dict[str, Any]:
    """Return None for what is not finite."""
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}


def _by_row(tensor: torch.Tensor, reference: torch.Tensor, scale: float, unit: Unit) -> Rows:
    if tensor.shape != reference.shape:
        raise ValueError(f"the shape is {tuple(tensor.shape)}, not {tuple(reference.shape)}")
    width = reference.shape[-1]
    rows, rows_reference = tensor.detach().reshape(-1, width), reference.reshape(-1, width)
    parts, norm = [], partial(torch.linalg.vector_norm, dim=-1)
    step = max(1, _CHUNK // width)
    for begin in range(0, len(rows), step):
        expected = rows_reference[begin : begin + step]
        difference = rows[begin : begin + step].to(expected.dtype)
        difference = (difference if scale == 1.0 else difference * scale) - expected
        figures = norm(difference), norm(expected), norm(difference, math.inf)
        parts.append(torch.stack(figures))
    # The device is waited for once.
    heads = reference.shape[0] * reference.shape[1] if reference.ndim == _BHSD else 1
    error, size, largest = torch.cat(parts, -1).cpu().double().unflatten(-1, (heads, -1))
    total = float(size.square().sum())
    if (total / reference.numel()) ** 0.5 <= unit.least:
        total = reference.numel() * unit.scale**2
    return Rows(error, size, (total / size.numel()) ** 0.5, float(largest.amax()))
