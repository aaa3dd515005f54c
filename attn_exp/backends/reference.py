"""The reference that accuracy is judged against: the formula in float32, in slices that fit in memory.

A backend like any other, so it can be measured too. Forward and backward are written out, so that neither needs the
scores of more than one slice: dv = pT dO, ds = p (dO vT - sum(dO o)), dq = ds k, dk = dsT q (FlashAttention,
arXiv:2205.14135, appendix B.2).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from attn_exp.attention.autograd import Gradients
from attn_exp.attention.inputs import Inputs
from attn_exp.attention.reference import _sliced, reference_forward
from attn_exp.backends.base import Calls, DeclarativeBackend
from attn_exp.backends.eager import Eager
from attn_exp.core.case import Case


class Reference(DeclarativeBackend):
    """Float32 attention of any size."""

    supports = replace(Eager.supports, keyless=True)
    claims = Eager.claims
    a_function = False

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Nothing to prepare."""
        return Calls(partial(reference_forward, case, inputs), partial(_backward, case, inputs))


def _backward(case: Case, inputs: Inputs, out: torch.Tensor) -> Callable[[], Gradients]:
    def gradients() -> Gradients:
        _, dq, dk, dv = _sliced(case, inputs, with_gradients=True)
        return dq, dk, dv

    return gradients
