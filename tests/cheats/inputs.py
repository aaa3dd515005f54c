"""Backends that change what they are asked, or say wrongly what they read."""

from dataclasses import replace
from typing import Any

from cheats.corpus import FORWARD, cheat
from cheats.ways import Plain, Run, Tensor, attend

WRONG = r"result of the first call|\b(out|dq|dk|dv)\b|input"


@cheat("inputs", "inaccurate", WRONG, passes=FORWARD, seen="KernelBench#82")
class ScalesQueriesInPlace(Plain):
    """Multiplies q by the scale in place, at each call."""

    def forward(self, run: Run) -> Tensor:
        self.inputs.q_bhsd.data.mul_(self.case.head_dim**-0.5)
        return attend(self.case, *self.inputs.qkv, scale=self.case.head_dim**0.5)


@cheat("inputs", ("inaccurate", "error"), r".", passes=FORWARD)
class FreesItsInputs(Plain):
    """Frees the memory of q after its first call."""

    def forward(self, run: Run) -> Tensor:
        if not hasattr(self, "kept"):
            self.kept = run()
            self.inputs.q_bhsd.untyped_storage().resize_(0)
        return self.kept


@cheat("inputs", "inaccurate", WRONG, passes=FORWARD)
class KeepsInputsFromPrepare(Plain):
    """Copies its inputs in `prepare` without naming the copies in `Calls.inputs`."""

    def prepare(self, case: Any, inputs: Any) -> Any:
        copies = [one.detach().clone() for one in inputs.qkv]
        return replace(super().prepare(case, inputs), forward=lambda: attend(case, *copies))
