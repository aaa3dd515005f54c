"""Backends with the bugs of planted_kernels.py, for the search that shall find them."""

from functools import partial

import planted_kernels

from attn_exp.attention.inputs import Inputs
from attn_exp.backends.base import Calls, DeclarativeBackend, calls_of
from attn_exp.backends.supports import Supports
from attn_exp.core.case.case import Case


class Planted(DeclarativeBackend):
    """`kernel` is a function of planted_kernels.py; `right` has no bug."""

    supports = Supports(
        devices=("cpu",),
        dtypes=("float32", "bfloat16", "float16"),
        features=("softcap",),
        keyless=True,
        value_dims="any",
    )

    def __init__(self, name: str, kernel: str = "right") -> None:
        super().__init__(name)
        self.kernel = getattr(planted_kernels, kernel)

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        call = partial(self.kernel, causal=case.causal, offset=case.offset, softcap=case.softcap)
        return calls_of(call, inputs)
