"""Sinks: a learned logit of each query head that joins the softmax's denominator and has no value.

The weights of a query are exp(s - lse) with lse = log(sum(exp(s)) + exp(sink)): they sum to less than one. The gradient
of a score is p (dp - sum(p dp)), as without a sink. The gradient of the sink is that of a key without a value, the sum
of -exp(sink - lse) sum(p dp) over the queries of its head.
"""

import math

import torch

from attn_exp.core.case.case import Case

# With normal scores the sink takes 5 to 50 % of a query that sees all keys, another share in each head.
_LEAST, _SPREAD = -2.5, 3.0
# Multiples of it are spread evenly (the golden ratio).
_STEP = (5**0.5 - 1) / 2


def sinks_of(case: Case, device: torch.device) -> torch.Tensor | None:
    """Return the sinks of a case's query heads, (1, q_heads, 1, 1) in its dtype; None if it has none."""
    if not case.sink:
        return None
    several = torch.arange(1, case.q_heads + 1, dtype=torch.float64) * _STEP % 1
    logits = math.log(case.most_keys) + _LEAST + _SPREAD * several
    return logits.to(getattr(torch, case.dtype)).to(device).reshape(1, -1, 1, 1)


def sinks_at(case: Case, heads: torch.Tensor) -> torch.Tensor | None:
    """Return the sinks of query heads that are counted over the batch, in float64 and the shape of `heads`."""
    sinks = sinks_of(case, heads.device)
    return None if sinks is None else sinks.double().flatten()[heads % case.q_heads]


def softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the weights of keys, whose last dimension is that of the masked `scores`.

    `sinks` of rows broadcast to (..., 1). With them, a row of minus infinities gets zeros.
    """
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    return torch.exp(scores - log_sum(scores, sinks))


def log_sum(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the logarithm of each row's sum of exponentials, (..., 1); the arguments are those of `softmax`."""
    of_keys = torch.logsumexp(scores, dim=-1, keepdim=True)
    return of_keys if sinks is None else torch.logaddexp(of_keys, sinks.to(scores.dtype))
