"""The errors of gradients of queries relative to the rows of d_out that they are of.

The gradient of a query is linear in its own row of the output's gradient: one that is 1,000 times smaller has a
gradient that is 1,000 times smaller and as exact. Beside larger ones no norm shows that it was left out.
"""

import torch

from attn_exp.core.text import apart

# Of fewer rows the usual size of a gradient is not known.
_LEAST_ROWS = 32
_TINY = torch.finfo(torch.float32).tiny


def worst_query(dq: torch.Tensor, reference: torch.Tensor, d_out: torch.Tensor) -> tuple[int, float]:
    """Return the row of dq with the largest error relative to its row of d_out, and this error.

    It is relative to that row of the reference, or to the usual one, each over the norm of its row of d_out. It is 0
    where there are too few rows to judge, and infinite if a number is not finite.

    Args:
        dq: the backend's tensor, or rows of it, (..., dim).
        reference: the expected values of the same shape.
        d_out: the same rows of the output's gradient, as numbers.

    Returns:
        The row, counted over all of them, and its error.
    """
    size = d_out.detach().float().norm(dim=-1).flatten()
    if size.numel() < _LEAST_ROWS:
        return 0, 0.0
    off = (dq.detach().to(reference.dtype) - reference).norm(dim=-1).flatten().to(size.dtype)
    share = torch.where(size > _TINY, torch.stack([off, reference.norm(dim=-1).flatten().to(size.dtype)]) / size, 0.0)
    usual = share[1].square().mean().sqrt().clamp(min=_TINY)
    error = (share[0] / share[1].maximum(usual)).nan_to_num_(nan=torch.inf)
    worst = int(error.argmax())
    return worst, float(error[worst])


def wrong_query(dq: torch.Tensor, reference: torch.Tensor, d_out: torch.Tensor, allowed: float) -> str | None:
    """Return that a row of dq is wrong as a sentence, or None; arguments are those of `worst_query`."""
    _, error = worst_query(dq, reference, d_out)
    if error <= allowed:
        return None
    of, most = apart(error, allowed)
    return f"a row of dq, relative to its row of d_out, is off by {of} of the usual norm, allowed is {most}"
