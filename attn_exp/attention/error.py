"""The error of a backend's tensors against the float32 reference, and whether it is within the tolerance.

A norm over the whole tensor hides what is small: a row, a tile, a scale that is off by less than rounding. So rows and
tiles are also judged by themselves, and so is the mean error along the reference, in which rounding cancels.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from attn_exp.attention.error_parts import (
    TILE,
    UNIT,
    Bias,
    Rows,
    Tolerance,
    Unit,
    biases,
    follows,
    of_positions,
    of_rows,
    of_tiles,
    place_of_row,
)
from attn_exp.attention.sampling import Places
from attn_exp.core.judged import TensorError
from attn_exp.core.text import apart

_CHUNK = 1 << 26
_BHSD = 4


def tensor_error(tensor: torch.Tensor, reference: torch.Tensor, scale: float = 1.0) -> TensorError:
    """Compare a tensor with its reference of the same shape.

    The comparison runs in the reference's precision, in slices of bounded memory.

    Args:
        tensor: the backend's tensor.
        reference: the expected values.
        scale: the factor of a tensor of codes.

    Raises:
        ValueError: the shapes differ.
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
    """Return `tensor_error` with what is allowed, and the other errors that `bounds` asks for.

    Args:
        tensor: the backend's tensor, or rows of it.
        reference: the expected values of the same shape.
        bounds: what is allowed.
        scale: the factor of a tensor of codes.
        places: which rows these are, (1, heads, n, dim); None if the tensor is whole.
        tile: how many of these rows are in a tile.
        unit: what errors are relative to if the reference vanishes.
        sizes: how the norms of rows differ on average, up to a factor; a row that is smaller than that is judged as if
            it had this norm.

    Raises:
        ValueError: the shapes differ.
    """
    rows = _by_row(tensor, reference, scale, unit)
    parts, bias = {"worst_row": of_rows(rows, 1.0, sizes)}, None
    allowed: dict[str, Any] = {"tolerance": bounds.relative, "row_tolerance": bounds.worst_row}
    if bounds.tile is not None:
        parts["worst_tile"] = of_tiles(rows, bounds.small, tile)
        allowed["tile_tolerance"] = bounds.tile
        if bounds.own_row is not None:
            parts["own_row"] = of_rows(rows, bounds.small)
            allowed["own_row_tolerance"] = bounds.own_row
    if bounds.least_row is not None:
        parts["least_row"] = follows(rows, bounds.least_norm, sizes)
        allowed["least_row_tolerance"] = bounds.least_row
    if bounds.position is not None:
        parts["worst_position"], parts["position_bias"] = of_positions(rows)
        allowed |= {"position_tolerance": bounds.position, "position_bias_tolerance": bounds.position_bias}
    if bounds.bias is not None:
        bias = biases(rows)
    found = _finite(_figures(rows, **parts) | _of_bias(bias))
    if found["relative"] is None:
        return TensorError(
            **{name: found[name] for name in _OF_WHOLE},
            **{name: allowed[name] for name in ("tolerance", "row_tolerance")},
        )
    noise = found.pop("noise", None)
    if noise is None:
        # There are too few rows to know a bias.
        found.pop("bias", None)
    elif bounds.bias is not None:
        allowed["bias_tolerance"] = bounds.bias + noise
    error = TensorError(**found, **allowed)
    if inaccuracy({"": error}) is None:
        return error
    where = {name: int(part.argmin() if name == "least_row" else part.argmax()) for name, part in parts.items()}
    if bias is not None and (head := int(bias.excess.argmax())) < len(bias.mean) - 1:
        where["bias"] = head
    shape = tuple(tensor.shape)
    return replace(error, where={name: place_of_row(name, at, shape, places, tile) for name, at in where.items()})


def measured_bias(tensor: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the magnitude of a tensor's bias beyond its noise; 0 where there is none, or where it is not known."""
    found = _finite(_of_bias(biases(_by_row(tensor, reference, 1.0, UNIT))))
    if found["bias"] is None or found["noise"] is None:
        return 0.0
    beyond: float = abs(found["bias"]) - found["noise"] / 2
    return max(0.0, beyond)


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
                what, are, their = _several(what)
                off, most = apart(found, allowed)
                return f"{what.format(name)} {are} off by {off} of {their} norm, allowed is {most}"
        if error.bias is not None and _exceeds(abs(error.bias), error.bias_tolerance):
            what = error.where.get("bias", "{}").format(name)
            large = "large" if error.bias > 0 else "small"
            return f"{what} is too {large} by {abs(error.bias):.2g} in the mean, allowed is {error.bias_tolerance:.2g}"
        if _exceeds(error.least_row_tolerance, error.least_row):
            what = error.where.get("least_row", "a row of {}").format(name)
            return f"{what} is {error.least_row:.2g} times what is right, allowed is {error.least_row_tolerance:.2g}"
        if _exceeds(error.worst_position, error.position_tolerance):
            assert error.worst_position is not None and error.position_tolerance is not None
            what, are, their = _several(error.where.get("worst_position", "rows of {}"))
            off, most = apart(error.worst_position, error.position_tolerance)
            return f"{what.format(name)} {are} off by {off} of {their} norm, allowed is {most}"
        if _exceeds(error.position_bias, error.position_bias_tolerance):
            what, are, _ = _several(error.where.get("position_bias", "rows of {}"))
            allowed = error.position_bias_tolerance
            return (
                f"{what.format(name)} {are} {error.position_bias:.2g} too large or too small, allowed is {allowed:.2g}"
            )
    return None


def _several(what: str) -> tuple[str, str, str]:
    """Return what is off with its verb and its pronoun."""
    return (what, "are", "their") if what.startswith("rows ") else (what, "is", "its")


def _exceeds(found: float | None, allowed: float | None) -> bool:
    return found is not None and allowed is not None and found > allowed


_OF_WHOLE = ("relative", "worst_row", "max_abs")


def _figures(rows: Rows, worst_row: torch.Tensor, **parts: torch.Tensor) -> dict[str, float]:
    """Return the fields of a `TensorError`: a part's is that of its worst place."""
    relative = float(rows.error.norm()) / (rows.typical * rows.norm.numel() ** 0.5)
    figures = {"relative": relative, "worst_row": float(worst_row.amax()), "max_abs": rows.largest}
    return figures | {name: float(part.amin() if name == "least_row" else part.amax()) for name, part in parts.items()}


def _of_bias(bias: Bias | None) -> dict[str, float]:
    """Return the bias that is furthest beyond its noise, and what its noise explains."""
    if bias is None:
        return {}
    worst = int(bias.excess.argmax())
    return {"bias": float(bias.mean[worst]), "noise": float(bias.noise[worst])}


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
        parts.append(torch.stack([*figures, difference.mul_(expected).sum(dim=-1)]))
    # The device is waited for once.
    heads = reference.shape[0] * reference.shape[1] if reference.ndim == _BHSD else 1
    error, size, largest, along = torch.cat(parts, -1).cpu().double().unflatten(-1, (heads, -1))
    total = float(size.square().sum())
    if (total / reference.numel()) ** 0.5 <= unit.least:
        total = reference.numel() * unit.scale**2
    return Rows(error, size, along, (total / size.numel()) ** 0.5, float(largest.amax()))
