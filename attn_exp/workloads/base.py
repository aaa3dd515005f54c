"""The workload contract: what stands around a backend's attention, and how that is judged."""

from typing import Any, Protocol

from attn_exp.attention.tolerance import Expected
from attn_exp.backends.base import Backend, Calls
from attn_exp.core.case import Case
from attn_exp.core.record import Work


class Workload(Protocol):
    """From a case to inputs, from those to what must come out, and from a backend to the calls to time.

    The inputs are `DifferentiableInputs`; which kind is the workload's own affair.
    """

    def make_inputs(self, case: Case, device: str, seed: int, *, with_gradients: bool) -> Any:
        """Fresh inputs from `seed`."""
        ...

    def expected(self, case: Case, inputs: Any, *, with_gradients: bool) -> Expected:
        """The output and the gradients in float32 with the reference's attention, and how near is near enough."""
        ...

    def calls(self, backend: Backend, case: Case, inputs: Any) -> Calls:
        """The calls with the backend's attention.

        Raises:
            Refused: the backend cannot be called from inside of this workload.
        """
        ...

    def work(self, case: Case) -> dict[str, Work]:
        """FLOPs and bytes by pass; empty where they follow from the case."""
        ...
