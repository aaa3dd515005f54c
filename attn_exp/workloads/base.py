"""The contract of workloads, which surround a backend's attention, and the one without a block."""

from typing import Any, Protocol

from attn_exp.attention.error import Tolerance
from attn_exp.attention.expected import Expected, expected
from attn_exp.attention.hard_values import make_inputs_of
from attn_exp.attention.inputs import Inputs
from attn_exp.backends.base import Backend, Calls
from attn_exp.core.case.case import NORMAL, Case
from attn_exp.core.record.record import Work


class Workload(Protocol):
    """Makes inputs, their reference, and the calls to time. Its inputs are `DifferentiableInputs` of its own kind."""

    def make_inputs(self, case: Case, device: str, seed: int, *, with_gradients: bool, kind: str = NORMAL) -> Any:
        """Return new inputs of a kind from `seed`. Raises ValueError if a block has no inputs of that kind."""
        ...

    def expected(
        self, case: Case, inputs: Any, *, with_gradients: bool, tolerances: dict[str, Tolerance] | None = None
    ) -> Expected:
        """Return output and gradients in float32 with the reference's attention, and their tolerances.

        A large case without a block gets only rows that are drawn anew. `tolerances` are those of an earlier reference
        of the same case.
        """
        ...

    def calls(self, backend: Backend, case: Case, inputs: Any) -> Calls:
        """Return the calls with the backend's attention.

        Raises Refused if the backend cannot be called inside this workload.
        """
        ...

    def work(self, case: Case) -> dict[str, Work]:
        """Return FLOPs and bytes by pass; empty if they follow from the case."""
        ...


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
