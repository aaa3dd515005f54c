"""The workload `attention`: the backend's calls, without a transformer block."""

from attn_exp.attention.error_parts import Tolerance
from attn_exp.attention.expected import Expected, expected
from attn_exp.attention.hard_values import make_inputs_of
from attn_exp.attention.inputs import Inputs
from attn_exp.backends.base import Backend, Calls
from attn_exp.core.case.case import NORMAL, Case
from attn_exp.core.record.record import Work


class AttentionAlone:
    """Only the attention, without a transformer block around it."""

    def make_inputs(self, case: Case, device: str, seed: int, *, with_gradients: bool, kind: str = NORMAL) -> Inputs:
        """Return q, k, v and the output's gradient."""
        return make_inputs_of(kind, case, device, seed, with_gradients=with_gradients)

    def expected(
        self, case: Case, inputs: Inputs, *, with_gradients: bool, tolerances: dict[str, Tolerance] | None = None
    ) -> Expected:
        """Return the reference of `out`, `dq`, `dk` and `dv`, at rows that are drawn anew if the case is large."""
        return expected(case, inputs, with_gradients=with_gradients, sampled=True, tolerances=tolerances)

    def calls(self, backend: Backend, case: Case, inputs: Inputs) -> Calls:
        """Return the calls that the backend prepares."""
        return backend.prepare(case, inputs)

    def work(self, case: Case) -> dict[str, Work]:
        """Return nothing: attn_exp.core.case.flops computes the work in closed form."""
        return {}
