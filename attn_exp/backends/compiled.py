"""The unfused formula compiled by Inductor: attention without hand-written kernels."""

from dataclasses import replace

from attn_exp.attention.inputs import Inputs
from attn_exp.backends.base import Calls
from attn_exp.backends.compile import compile_calls
from attn_exp.backends.eager import Eager
from attn_exp.core.case.case import Case
from attn_exp.core.record.request import Compile


class Compiled(Eager):
    """`eager` with `compile=default`, as a backend with its own name."""

    claims = {}
    a_function = False
    generates_triton = True

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Return the formula's calls; they compile when first called."""
        calls = compile_calls(super().prepare(case, inputs), Compile(mode="default"))
        return replace(calls, attention=None)  # already compiled
