"""Sums over a head that its gradients of keys have in any attention: they show a wrong head without a reference.

The weights of a query sum to one, so that dv of all keys sums to d_out of all queries that see a key. And qT dq is
dkT k, matrices (head_dim, head_dim): both are the sum over all queries and keys of q kT times the gradient of their
score.
"""

from collections.abc import Mapping

import torch

from attn_exp.attention.formula import seen_keys
from attn_exp.attention.inputs import Inputs
from attn_exp.core.case import Case

# Sums of random terms are rarely smaller than this share of their root mean square.
_LEAST = 0.3
# Rounding is within this many times the tensor's tolerance, and the sum of what was left out is not within this share.
_TOLERANCES, _MOST = 12.0, 0.5


def allowed_sum(relative: float) -> float:
    """Return the relative error that a sum may have where the tensor may have `relative`."""
    return min(_MOST, _TOLERANCES * relative)


def sums_of_dv(of_queries: torch.Tensor, by_row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what dv of a head sums to, (heads, dim), and what errors of these sums are relative to, (heads,).

    Args:
        of_queries: d_out of the queries that share the head's keys, (heads, group, q_len, dim) in float32.
        by_row: a factor of each query's row, 0 for one that sees no key, (heads or 1, q_len).
    """
    of_heads = by_row.expand(len(of_queries), -1)
    sums = torch.einsum("hgqd,hq->hd", of_queries, of_heads)
    usual = (of_queries.square().sum((1, 3)) * of_heads.square()).sum(-1).sqrt()
    return sums, sums.norm(dim=-1).maximum(_LEAST * usual).clamp(min=torch.finfo(torch.float32).tiny)


@torch.no_grad()
def wrong_head(
    case: Case,
    inputs: Inputs,
    tensors: Mapping[str, torch.Tensor],
    scales: Mapping[str, float],
    relative: Mapping[str, float],
) -> str | None:
    """Return which head of dk or dv is wrong as a sentence, or None.

    Args:
        case: the problem.
        inputs: what the backward computed on.
        tensors: `dq`, `dk` and `dv` in the shapes of q, k and v.
        scales: their factors if they are codes.
        relative: the tolerance of each.
    """
    numbers = inputs.numbers()
    group = case.q_heads // case.kv_heads
    dq, dk, dv = (tensors[name].detach().float() * scales.get(name, 1.0) for name in ("dq", "dk", "dv"))

    def grouped(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().float().reshape(-1, group, *tensor.shape[2:])

    first, last = seen_keys(case, torch.arange(case.q_len, device=dv.device))
    sums, size = sums_of_dv(grouped(numbers.d_out_bhsd), (first <= last).float()[None])
    of_dv = (dv.sum(2).flatten(0, 1) - sums).norm(dim=-1) / size
    of_queries = grouped(numbers.q_bhsd).flatten(1, 2).mT @ grouped(dq).flatten(1, 2)
    of_keys = (dk.mT @ numbers.k_bhsd.detach().float()).flatten(0, 1)
    size = torch.maximum(*(one.flatten(1).norm(dim=-1) for one in (of_queries, of_keys)))
    of_dk = (of_queries - of_keys).flatten(1).norm(dim=-1) / size.clamp(min=torch.finfo(torch.float32).tiny)
    worst = torch.stack([torch.stack([error.amax(), error.argmax().float()]) for error in (of_dk, of_dv)]).tolist()
    for name, (error, head) in zip(("dk", "dv"), worst, strict=True):
        allowed = allowed_sum(max(relative[name], relative["dq"] if name == "dk" else 0.0))
        if not error <= allowed:
            where = f"head {int(head) % case.kv_heads} of batch row {int(head) // case.kv_heads}"
            sums_to = "dkT k is not qT dq" if name == "dk" else "dv of all keys does not sum to d_out"
            return f"{sums_to} in {where}: off by {error:.2g}, allowed is {allowed:.2g}"
    return None
