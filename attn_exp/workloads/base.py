"""The contract of workloads: what surrounds a backend's attention, and how the result is checked."""

from typing import Any, Protocol

from attn_exp.attention.error_parts import Tolerance
from attn_exp.attention.expected import Expected
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
