"""The errors of channels by their own norm: beside channels that are large, no norm of a row shows the others."""

import torch

from attn_exp.core.text import apart

# Of fewer rows a channel may happen to be small.
_LEAST_ROWS = 32
# A channel with a smaller root mean square than so many smallest normal numbers may be rounded to zeros.
_LEAST_NORMAL = 16.0
# The square of a number of this magnitude is a normal one in float32.
_SQUARES = 2.0**-60


def worst_channel(tensor: torch.Tensor, reference: torch.Tensor, dtype: str) -> tuple[int, float]:
    """Return the channel of the last dimension with the largest |x - ref| / |ref|, and this error.

    The error is 0 where there are too few rows to judge, and infinite if a number is not finite.

    Args:
        tensor: the backend's tensor, or rows of it.
        reference: the expected values of the same shape.
        dtype: that of the case; channels near its smallest numbers are not looked at.
    """
    rows = reference[..., 0].numel()
    if rows < _LEAST_ROWS:
        return 0, 0.0
    of = reference.square().sum((0, 1, 2))
    off = (tensor.to(reference.dtype) - reference).square_().sum((0, 1, 2))
    least = rows * max(_LEAST_NORMAL * torch.finfo(getattr(torch, dtype)).tiny, _SQUARES) ** 2
    share = torch.where(of > least, off / of, 0.0).nan_to_num_(nan=torch.inf).sqrt()
    worst = int(share.argmax())
    return worst, float(share[worst])


def wrong_channel(name: str, tensor: torch.Tensor, reference: torch.Tensor, dtype: str, allowed: float) -> str | None:
    """Return which channel of a tensor is wrong as a sentence, or None; arguments are those of `worst_channel`."""
    channel, error = worst_channel(tensor, reference, dtype)
    if error <= allowed:
        return None
    of, most = apart(error, allowed)
    return f"channel {channel} of {name} is off by {of} of its own norm, allowed is {most}"
