"""Whether what is not a number stays it.

An overflow shows by numbers that are not finite: training skips a step for them, and who scales the loss relies on
that. A backend that replaces them, by `nan_to_num` say, hides it.
"""

from dataclasses import replace
from random import SystemRandom

import torch

from attn_exp.attention.formula import seen_keys
from attn_exp.attention.inputs import Inputs
from attn_exp.backends.base import Calls
from attn_exp.core.case import Case
from attn_exp.worker.judge.judge import Judge


def hidden_nan(case: Case, calls: Calls, judge: Judge, seeded: Inputs, *, with_gradients: bool) -> str | None:
    """Call each pass with a NaN in one row of q and one in a row of d_out, and return what hides them, or None.

    By the formula the row of the output is NaN, and so are the row of dq, and dk and dv of the keys that the query
    sees. Of each, one element that is not finite is enough: what becomes of other rows, which kernels compute in one
    tile, is not asked. Codes of fp8 and int8 are not tried, which have no NaN or round it to a number.

    The inputs are left with these values.
    """
    if case.quantised:
        return None
    first, last = seen_keys(case, torch.arange(case.q_len))
    seeing = (last >= first).nonzero().flatten().tolist()
    if not seeing:
        return None
    dice, group = SystemRandom(), case.q_heads // case.kv_heads
    # In two heads of keys, if there are two: gradients of the first are NaN whatever d_out is.
    places = dice.sample(range(case.batch * case.kv_heads), min(2, case.batch * case.kv_heads))
    (of_q, of_d_out), query = (places[0], places[-1]), dice.choice(seeing)
    values = replace(seeded, q_bhsd=_with_nan(seeded.q_bhsd, of_q, group, query))
    judge.write(values)
    returned = calls.forward()
    out = judge.results("forward", returned)["out"]
    if bool(_row(out, of_q, group, query).isfinite().all()):
        return f"a NaN in row {query} of q leaves that row of out finite: an overflow would be hidden"
    if not with_gradients:
        return None
    judge.write(replace(values, d_out_bhsd=_with_nan(seeded.d_out_bhsd, of_d_out, group, query)))
    gradients = judge.results("backward", calls.backward(returned)())
    batch, head = divmod(of_d_out, case.kv_heads)
    parts = {
        "dq": _row(gradients["dq"], of_d_out, group, query),
        "dk": gradients["dk"][batch, head],
        "dv": gradients["dv"][batch, head],
    }
    for name, part in parts.items():
        if bool(part.isfinite().all()):
            return f"a NaN in row {query} of d_out leaves {name} finite: an overflow would be hidden"
    return None


def _row(tensor: torch.Tensor, of_keys: int, group: int, query: int) -> torch.Tensor:
    """Return the row of a query in the first head of a group; groups are counted over all rows of the batch."""
    batch, head = divmod(of_keys, tensor.shape[1] // group)
    return tensor[batch, head * group, query]


def _with_nan(tensor: torch.Tensor, of_keys: int, group: int, query: int) -> torch.Tensor:
    changed = tensor.detach().clone()
    _row(changed, of_keys, group, query)[0] = torch.nan
    return changed
