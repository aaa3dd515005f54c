"""Backends that go wrong on a GPU, for the GPU suite."""

import torch
from fakes import Honest

from attn_exp.attention.inputs import Inputs
from attn_exp.attention.reference import reference
from attn_exp.backends.base import Calls
from attn_exp.backends.sdpa import Flash, Math, Sdpa
from attn_exp.core.case.case import Case


class Asserts(Honest):
    """A device-side assert, which poisons the CUDA context for good."""

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        honest = super().prepare(case, inputs)

        def forward() -> torch.Tensor:
            torch.empty(4, device="cuda")[torch.tensor([1 << 20], device="cuda")]
            torch.cuda.synchronize()
            return honest.forward()

        return Calls(forward, honest.backward)


class TakesAllMemory(Honest):
    """Asks the GPU for more than it has."""

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        torch.empty(torch.cuda.get_device_properties(0).total_memory * 2, dtype=torch.int8, device="cuda")
        return super().prepare(case, inputs)


class MislabelledFlash(Flash):
    """Says flash and runs the formula."""

    choice = Math.choice


class ComputesNothing(Sdpa):
    """Returns the right answer without working for it: right, and impossibly fast."""

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        known = reference(case, inputs, with_gradients=True)
        out = known["out"].to(inputs.q_bhsd.dtype)
        gradients = tuple(known[name].to(out.dtype) for name in ("dq", "dk", "dv"))
        touched = torch.empty(1, device="cuda")

        def forward() -> torch.Tensor:
            touched.add_(1)
            return out

        def backward(_):
            def again():
                touched.add_(1)
                return gradients

            return again

        return Calls(forward, backward)
