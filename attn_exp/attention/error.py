"""The error of a backend's tensors against the float32 reference, and whether it is within the tolerance."""

import math

import torch

from attn_exp.core.record import TensorError

# A reference with a smaller root mean square is rounding noise of inputs of unit scale.
VANISHING = 1e-5
_CHUNK = 1 << 26


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
    if tensor.shape != reference.shape:
        raise ValueError(f"the shape is {tuple(tensor.shape)}, not {tuple(reference.shape)}")
    width = reference.shape[-1]
    rows, rows_reference = tensor.detach().reshape(-1, width), reference.reshape(-1, width)
    total = torch.zeros(2, dtype=torch.float64, device=reference.device)
    error_norms, reference_norms, largest = [], [], []
    step = max(1, _CHUNK // width)
    for begin in range(0, len(rows), step):
        expected = rows_reference[begin : begin + step]
        difference = rows[begin : begin + step].to(expected.dtype) * scale - expected
        largest.append(difference.abs().max())
        error_norms.append(difference.norm(dim=-1))
        reference_norms.append(expected.norm(dim=-1))
        total += torch.stack([error_norms[-1].double().square().sum(), reference_norms[-1].double().square().sum()])
    error, norm = torch.cat(error_norms), torch.cat(reference_norms)
    if (total[1] / reference.numel()).sqrt() < VANISHING:
        # dq and dk vanish where a query sees one key: errors are then relative to the inputs' unit scale.
        total[1] = reference.numel()
    typical = (total[1] / len(rows)).sqrt().to(norm.dtype)
    worst = (error / torch.maximum(norm, typical)).max()
    relative = (total[0] / total[1]).sqrt()
    values = torch.stack([relative, worst.double(), torch.stack(largest).max().double()]).tolist()
    relative_f, worst_f, largest_f = (value if math.isfinite(value) else None for value in values)
    return TensorError(relative=relative_f, worst_row=worst_f, max_abs=largest_f)


def inaccuracy(errors: dict[str, TensorError]) -> str | None:
    """Return a sentence that says which tensor is inaccurate and by how much, or None."""
    for name, error in errors.items():
        if error.relative is None or error.worst_row is None:
            return f"{name} has values that are not finite"
        if error.tolerance is not None and error.relative > error.tolerance:
            return f"{name} is off by {error.relative:.2g} of its norm, allowed is {error.tolerance:.2g}"
        if error.row_tolerance is not None and error.worst_row > error.row_tolerance:
            return f"a row of {name} is off by {error.worst_row:.2g} of its norm, allowed is {error.row_tolerance:.2g}"
    return None
