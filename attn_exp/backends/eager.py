"""Attention as written, softmax(q kT / sqrt(d)) v, one PyTorch operator after another."""

from functools import partial

from attn_exp.attention.formula import formula, hidden_keys
from attn_exp.attention.inputs import Inputs, paged, sinks_in
from attn_exp.attention.scores import bias_tensor
from attn_exp.backends.base import Calls, DeclarativeBackend, calls_of, from_pages
from attn_exp.backends.supports import Supports
from attn_exp.core.case.case import HALVES, Case
from attn_exp.core.case.features import EVERY_FEATURE
from attn_exp.core.case.masks import EVERY


class Eager(DeclarativeBackend):
    """The unfused formula in the case's dtype; all scores are held in memory."""

    supports = Supports(
        devices=("cuda", "cpu"),
        dtypes=("bfloat16", "float16", "float32"),
        masks=EVERY,
        features=EVERY_FEATURE,
        value_dims="any",
    )
    transparent = True
    # A softmax kernel of its own, which no fused attention has. It is a signature and not the work: on a CPU it takes
    # from 0.2 to 35 % of the operators' time.
    claims = {(device, direction): r"(?i)softmax" for device in ("cuda", "cpu") for direction in HALVES}
    claimed_share = 0.0

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Build the mask, the biases and a pool of pages once, untimed; calls copy keys and values from pages."""
        inputs = paged(case, inputs)
        device = inputs.q_bhsd.device
        mask = hidden_keys(case, 0, case.q_len, device) if not case.dense else None
        bias = bias_tensor(case, device, inputs.q_bhsd.dtype)
        attention = partial(formula, case, mask, sinks=sinks_in(case, inputs), bias=bias)
        return calls_of(from_pages(attention, inputs), inputs)
