"""Sums that a head's gradients of keys have in any attention: they show a wrong head without a reference.

The weights of a query sum to one, so that dv of all keys sums to d_out of all queries that see a key. The matrices qT
dq and dkT k, (head_dim, head_dim), are equal. Both sum q kT times the gradient of its score over all queries and keys.
"""

from collections.abc import Mapping

import torch

from attn_exp.attention.formula import seen_keys
from attn_exp.attention.inputs import Inputs
from attn_exp.core.case.case import Case

# Sums of random terms are rarely smaller than this share of their root mean square.
_LEAST_SUM = 0.3
# Rounding is within this many times the tensor's tolerance, and the sum of what was left out is not within this share.
_TOLERANCES, _MOST = 12.0, 0.5
# With few keys the gradients of scores cancel, so that dq and dk are rounding.
_LEAST_KEYS = 16
# Numbers of a tensor that are held at once: 1 GiB in float32.
_MOST_NUMBERS = 1 << 28
_TINY = torch.finfo(torch.float32).tiny
_SCORES, _VALUES = "dkT k is not qT dq", "dv of all keys does not sum to d_out"


@torch.no_grad()
def wrong_head(
    case: Case,
    inputs: Inputs,
    tensors: Mapping[str, torch.Tensor],
    scales: Mapping[str, float],
    relative: Mapping[str, float],
) -> str | None:
    """Return which head of dk or dv is wrong as a sentence, or None.

    The inputs are normally distributed: sums of hard values are no larger than their rounding. `scales` are the factors
    of gradients in codes, `relative` their tolerances.
    """
    numbers = inputs.numbers()
    allowed = {_SCORES: max(relative["dk"], relative["dq"]), _VALUES: relative["dv"]}
    step = max(1, _MOST_NUMBERS // (case.q_heads * case.q_len * max(case.head_dim, case.value_dim)))
    for begin in range(0, case.batch, step):
        some = slice(begin, begin + step)
        q, k, v, d_out = (one[some] for one in (*numbers.qkv, numbers.d_out_bhsd))
        made = {name: tensor.detach()[some].float() * scales.get(name, 1.0) for name, tensor in tensors.items()}
        for what, errors in _errors(case, Inputs(q, k, v, d_out), made).items():
            error, head = (float(found) for found in errors.max(dim=0))
            most = min(_MOST, _TOLERANCES * allowed[what])
            if not error <= most:
                batch, head = divmod(int(head), case.kv_heads)
                where = f"head {head} of batch row {begin + batch}"
                return f"{what} in {where}: off by {error:.2g}, allowed is {most:.2g}"
    return None


def _errors(case: Case, numbers: Inputs, made: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the relative errors of each head, (batch * kv_heads,), by what they say."""
    group, errors = case.q_heads // case.kv_heads, {}

    def grouped(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().float().reshape(-1, group, *tensor.shape[2:])

    # With a sink the weights of a query sum to less than one.
    if not case.sink:
        first, last = seen_keys(case, torch.arange(case.q_len, device=numbers.q_bhsd.device))
        d_out = grouped(numbers.d_out_bhsd) * (first <= last).float()[:, None]
        sums, usual = d_out.sum((1, 2)), torch.linalg.vector_norm(d_out, dim=(1, 2, 3))
        off = (made["dv"].sum(2).flatten(0, 1) - sums).norm(dim=-1)
        errors[_VALUES] = off / sums.norm(dim=-1).maximum(_LEAST_SUM * usual).clamp(min=_TINY)
    if case.most_keys >= _LEAST_KEYS:
        of_queries = grouped(numbers.q_bhsd).flatten(1, 2).mT @ grouped(made["dq"]).flatten(1, 2)
        of_keys = (made["dk"].mT @ numbers.k_bhsd.detach().float()).flatten(0, 1)
        off, *norms = (one.flatten(1).norm(dim=-1) for one in (of_queries - of_keys, of_queries, of_keys))
        errors[_SCORES] = off / torch.maximum(*norms).clamp(min=_TINY)
    return errors
