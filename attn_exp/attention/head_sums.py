"""Sums over a head that its gradients of keys have in any attention: they show a wrong head without a reference.

The weights of a query sum to one, so that dv of all keys sums to d_out of all queries that see a key. And qT dq is
dkT k, matrices (head_dim, head_dim): both are the sum over all queries and keys of q kT times the gradient of their
score. In the same way dvT v is d_outT out, the sum of d_out vT times the weights.
"""

from collections.abc import Mapping

import torch

from attn_exp.attention.formula import seen_keys
from attn_exp.attention.inputs import Inputs, unit_of
from attn_exp.core.case import Case

# Sums of random terms are rarely smaller than this share of their root mean square.
LEAST_SUM = 0.3
# Rounding is within this many times the tensor's tolerance, and the sum of what was left out is not within this share.
_TOLERANCES, _MOST = 12.0, 0.5
# A sum of rounded numbers is off by the root of their squares' sum times the dtype's `eps`: dv of 150 random cases in
# 16 bits, by the plain formula and by PyTorch's flash kernel on a CPU, was off by at most 1.01 of that.
_ROUNDINGS = 8.0
# The same of the order of float32 sums, relative to all terms.
_OF_ORDER = 2.0**-20
# A query that one side lacks: the share of its term that is missing, and the standard errors of the noise around it.
_SHARE, _ERRORS = 0.5, 12.0
# With few keys the gradients of scores cancel, so that dq and dk are rounding.
LEAST_KEYS = 16
# Numbers of a tensor that are held at once: 1 GiB in float32.
_MOST_NUMBERS = 1 << 28


_TINY = torch.finfo(torch.float32).tiny
# What is wrong, and the unit of its error.
_SCORES, _VALUES = ("dkT k is not qT dq", ""), ("dv of all keys does not sum to d_out", "")
_WEIGHTS = ("dvT v is not d_outT out", "")
_ROUNDED = ("dv of all keys does not sum to d_out", " times its rounding")
_LACKING = ("dkT k is not qT dq, as if one of them lacked a query", "")
# Of fewer channels the products of v and out may be small by chance.
_LEAST_DIM = 8


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
    usual = (torch.linalg.vector_norm(of_queries, dim=(1, 3)) * of_heads).norm(dim=-1)
    return sums, sums.norm(dim=-1).maximum(LEAST_SUM * usual).clamp(min=_TINY)


@torch.no_grad()
def wrong_head(
    case: Case,
    inputs: Inputs,
    tensors: Mapping[str, torch.Tensor],
    scales: Mapping[str, float],
    relative: Mapping[str, float],
    out: torch.Tensor | None = None,
) -> str | None:
    """Return which head of dk or dv is wrong as a sentence, or None.

    In 16 bits or more also one query that a head lacks shows.

    Args:
        case: the problem.
        inputs: what the backward computed on, normally distributed: rounding is as large as sums of hard values.
        tensors: `dq`, `dk` and `dv` in the shapes of q, k and v.
        scales: their factors if they are codes.
        relative: the tolerance of each, and of `out`.
        out: the output, with which rows of dv that are exchanged show; None where a reference shows them.
    """
    tensors = dict(tensors) if out is None else {"out": out, **tensors}
    numbers = inputs.numbers()
    allowed = {
        _SCORES: allowed_sum(max(relative["dk"], relative["dq"])),
        _VALUES: allowed_sum(relative["dv"]),
        _WEIGHTS: allowed_sum(max(relative["dv"], relative["out"])),
        _ROUNDED: _ROUNDINGS,
        _LACKING: 1.0,
    }
    step = max(1, _MOST_NUMBERS // (case.q_heads * case.q_len * max(case.head_dim, case.value_dim)))
    for begin in range(0, case.batch, step):
        some = slice(begin, begin + step)
        q, k, v, d_out = (one[some] for one in (*numbers.qkv, numbers.d_out_bhsd))
        made = {name: tensor.detach()[some].float() * scales.get(name, 1.0) for name, tensor in tensors.items()}
        errors = _errors(case, Inputs(q, k, v, d_out), made)
        if not errors:
            continue
        worst, heads = torch.stack(list(errors.values())).max(dim=-1)
        for (said, times), error, head in zip(errors, worst.tolist(), heads.tolist(), strict=True):
            most = allowed[said, times]
            if not error <= most:
                where = f"head {head % case.kv_heads} of batch row {begin + head // case.kv_heads}"
                return f"{said} in {where}: off by {error:.2g}{times}, allowed is {most:.2g}"
    return None


def _errors(case: Case, numbers: Inputs, made: Mapping[str, torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
    """Return the errors of each head, (heads,), by what they say; at fp8 those of single queries are left out."""
    group = case.q_heads // case.kv_heads
    dq, dk, dv = (made[name] for name in ("dq", "dk", "dv"))
    v = numbers.v_bhsd.detach().float()

    def grouped(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().float().reshape(-1, group, *tensor.shape[2:])

    first, last = seen_keys(case, torch.arange(case.q_len, device=dv.device))
    d_out = grouped(numbers.d_out_bhsd)
    sums, size = sums_of_dv(d_out, (first <= last).float()[None])
    off = (dv.sum(2).flatten(0, 1) - sums).norm(dim=-1)
    # With a sink the weights of a query sum to less than one.
    errors = {} if case.sink else {_VALUES: off / size}
    if "out" in made and case.value_dim >= _LEAST_DIM:
        of_outputs = d_out.flatten(1, 2).mT @ grouped(made["out"]).flatten(1, 2)
        errors[_WEIGHTS], _ = _apart(of_outputs, (dv.mT @ v).flatten(0, 1))
    if not case.quantised:
        unit = unit_of(case)
        rounding = unit * dv.flatten(0, 1).flatten(1).norm(dim=-1) + _OF_ORDER * d_out.flatten(1).norm(dim=-1)
        if not case.sink:
            errors[_ROUNDED] = off / rounding.clamp(min=_TINY)
    if case.most_keys < LEAST_KEYS:
        return errors
    q, of_q = grouped(numbers.q_bhsd).flatten(1, 2), grouped(dq).flatten(1, 2)
    of_queries, of_keys = q.mT @ of_q, (dk.mT @ numbers.k_bhsd.detach().float()).flatten(0, 1)
    errors[_SCORES], norm = _apart(of_queries, of_keys)
    if not case.quantised:
        difference = of_queries - of_keys
        terms = q.norm(dim=-1) * of_q.norm(dim=-1)
        along = ((q @ difference) * of_q).sum(-1)
        clear = along.abs() * case.head_dim > _ERRORS * terms * norm.unsqueeze(-1)
        share = (along.abs() / terms.square().clamp(min=_TINY)).where(clear, 0.0)
        errors[_LACKING] = (share / _SHARE).where(share < 1 + _SHARE, 0.0).amax(-1)
    return errors


def _apart(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how far matrices (heads, ...) are apart, relative to the larger one of each head, and absolutely."""
    norms = torch.stack([matrix.flatten(1).norm(dim=-1) for matrix in (one - other, one, other)])
    return norms[0] / norms[1:].amax(0).clamp(min=_TINY), norms[0]
