"""The float32 reference of the accuracy check as a backend, so that it can be measured too."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from attn_exp.attention.inputs import Gradients, Inputs
from attn_exp.attention.reference import reference, sink_gradients
from attn_exp.backends.base import Calls, DeclarativeBackend
from attn_exp.backends.eager import Eager
from attn_exp.core.case.case import Case
from attn_exp.core.case.features import EVERY_FEATURE


class Reference(DeclarativeBackend):
    """Float32 attention of any size."""

    supports = replace(Eager.supports, keyless=True, features=tuple(name for name in EVERY_FEATURE if name != "paged"))
    # With sinks it sums exponentials.
    claims = dict.fromkeys(Eager.claims, r"(?i)softmax|logsumexp")
    claimed_share = Eager.claimed_share
    a_function = False

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Return the reference's calls, whose results are rounded to the inputs' dtype."""
        return Calls(partial(_forward, case, inputs), partial(_backward, case, inputs), inputs=inputs)


def _forward(case: Case, inputs: Inputs) -> torch.Tensor:
    return reference(case, inputs, with_gradients=False)["out"].to(inputs.q_bhsd.dtype)


def _backward(case: Case, inputs: Inputs, out: torch.Tensor) -> Callable[[], Gradients]:
    def gradients() -> Gradients:
        made = reference(case, inputs, with_gradients=True)
        if inputs.sink is not None:
            made["d_sink"], _ = sink_gradients(case, inputs, torch.arange(case.kv_heads))
        return tuple(made[name].to(inputs.q_bhsd.dtype) for name in inputs.gradient_names)

    return gradients
