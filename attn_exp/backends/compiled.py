"""The plain formula through Inductor: what torch.compile makes of attention that nobody fused by hand."""

from dataclasses import replace

from attn_exp.attention.inputs import Inputs
from attn_exp.backends.base import Calls
from attn_exp.backends.compile import compile_calls
from attn_exp.backends.eager import Eager
from attn_exp.core.case import Case
from attn_exp.core.record import Compile


class Compiled(Eager):
    """`eager` with `compile=default`, under a name of its own."""

    claims = {}
    a_function = False

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """The formula, compiled in its first calls."""
        calls = compile_calls(super().prepare(case, inputs), Compile(mode="default"))
        return replace(calls, attention=None)  # it is compiled already
