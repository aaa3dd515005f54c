"""Backends that change what they are asked, or say wrongly what they read."""

from dataclasses import replace
from typing import Any

import torch

from cheats.corpus import BOTH, FORWARD, case_of, cheat
from cheats.ways import Plain, Run, Tensor, attend

LOW = case_of(dtype="bfloat16")
WRONG = r"result of the first call|\b(out|dq|dk|dv)\b|input"


@cheat("inputs", "inaccurate", WRONG, passes=FORWARD, seen="KernelBench#82")
class ZeroesItsInputs(Plain):
    """Sets v to zero in `prepare` and returns zeros."""

    def prepared(self, case: Any, inputs: Any) -> Any:
        inputs.v_bhsd.data.zero_()
        return inputs

    def forward(self, run: Run) -> Tensor:
        return torch.zeros_like(self.inputs.d_out)


@cheat("inputs", "inaccurate", WRONG, passes=FORWARD, seen="KernelBench#82")
class ScalesQueriesInPlace(Plain):
    """Multiplies q by the scale in place, at each call."""

    def forward(self, run: Run) -> Tensor:
        self.inputs.q_bhsd.data.mul_(self.case.head_dim**-0.5)
        return attend(self.case, *self.inputs.qkv, scale=self.case.head_dim**0.5)


@cheat("inputs", "inaccurate", WRONG, passes=FORWARD, seen="KernelBench#82")
class ScalesQueriesOnce(Plain):
    """Multiplies q by the scale in place, in its first call, and says so to nobody."""

    done = False

    def forward(self, run: Run) -> Tensor:
        if not self.done:
            self.inputs.q_bhsd.data.mul_(self.case.head_dim**-0.5)
            self.done = True
        return attend(self.case, *self.inputs.qkv, scale=self.case.head_dim**0.5)


@cheat("inputs", "inaccurate", WRONG, passes=FORWARD)
class SpoilsOneElement(Plain):
    """Writes one element of k after each call."""

    def forward(self, run: Run) -> Tensor:
        out = run()
        self.inputs.k_bhsd.data[0, 0, 5, 3] += 1.0
        return out


@cheat("inputs", "inaccurate", WRONG)
class SpoilsTheGradient(Plain):
    """Scales the output's gradient in place in each backward."""

    def backward(self, run: Run) -> Any:
        self.inputs.d_out.mul_(0.5)
        return run()


@cheat("inputs", ("inaccurate", "error"), r".", passes=FORWARD)
class FreesItsInputs(Plain):
    """Frees the memory of q after its first call."""

    def forward(self, run: Run) -> Tensor:
        if not hasattr(self, "kept"):
            self.kept = run()
            self.inputs.q_bhsd.untyped_storage().resize_(0)
        return self.kept


@cheat("inputs", ("inaccurate", "error"), r".", passes=FORWARD)
class ShortensItsInputs(Plain):
    """Points q at a single query and expands that query's output."""

    done = False

    def forward(self, run: Run) -> Tensor:
        if not self.done:
            self.done = True
            return run()
        q = self.inputs.q_bhsd
        return attend(self.case, q.data[:, :, :1], *self.inputs.qkv[1:]).expand(-1, -1, self.case.q_len, -1)


@cheat("inputs", ("inaccurate", "error"), r".", passes=FORWARD)
class SwapsItsInputs(Plain):
    """Points q at another memory in its first call, so that later changes are of its own copy."""

    done = False

    def forward(self, run: Run) -> Tensor:
        if not self.done:
            self.done, self.out = True, run()
            self.inputs.q_bhsd.data = torch.zeros_like(self.inputs.q_bhsd)
            self.inputs.v_bhsd.data = torch.zeros_like(self.inputs.v_bhsd)
            return self.out
        return torch.zeros_like(self.out)


@cheat("inputs", "inaccurate", WRONG, passes=FORWARD)
class KeepsInputsFromPrepare(Plain):
    """Copies its inputs in `prepare` without naming the copies in `Calls.inputs`."""

    def prepare(self, case: Any, inputs: Any) -> Any:
        copies = [one.detach().clone() for one in inputs.qkv]
        return replace(super().prepare(case, inputs), forward=lambda: attend(case, *copies))


@cheat("inputs", "inaccurate", WRONG, passes=FORWARD)
class ConvertsKeysInPrepare(Plain):
    """Transposes k in `prepare` and names the original in `Calls.inputs`."""

    def prepare(self, case: Any, inputs: Any) -> Any:
        turned, (q, _, v) = inputs.k_bhsd.detach().mT.contiguous(), inputs.qkv
        calls = super().prepare(case, inputs)
        return replace(calls, forward=lambda: torch.softmax(q @ turned * case.head_dim**-0.5, -1) @ v)


@cheat("inputs", ("inaccurate", "error"), WRONG, passes=FORWARD)
class NamesADecoy(Plain):
    """Names copies in `Calls.inputs` that its calls never read, and returns its first output for ever."""

    kept: Tensor | None = None

    def prepare(self, case: Any, inputs: Any) -> Any:
        decoy = replace(inputs, **{name: getattr(inputs, name).clone() for name in ("q_bhsd", "k_bhsd", "v_bhsd")})
        return replace(super().prepare(case, inputs), inputs=decoy)

    def forward(self, run: Run) -> Tensor:
        if self.kept is None:
            self.kept = run()
        return self.kept


@cheat("inputs", ("inaccurate", "error"), r".", passes=FORWARD)
class NamesZeros(Plain):
    """Names zeros in `Calls.inputs`, whose output is known without computing."""

    done = False

    def prepare(self, case: Any, inputs: Any) -> Any:
        decoy = replace(
            inputs, **{name: torch.zeros_like(getattr(inputs, name)) for name in ("q_bhsd", "k_bhsd", "v_bhsd")}
        )
        return replace(super().prepare(case, inputs), inputs=decoy)

    def forward(self, run: Run) -> Tensor:
        if not self.done:
            self.done = True
            return run()
        return torch.zeros_like(self.inputs.d_out)


@cheat("inputs", ("inaccurate", "error"), r".", passes=FORWARD)
class NamesEmptyTensors(Plain):
    """Names tensors without elements in `Calls.inputs`, of which nothing can change."""

    kept: Tensor | None = None

    def prepare(self, case: Any, inputs: Any) -> Any:
        decoy = replace(inputs, **{name: getattr(inputs, name)[:0] for name in ("q_bhsd", "k_bhsd", "v_bhsd")})
        return replace(super().prepare(case, inputs), inputs=decoy)

    def forward(self, run: Run) -> Tensor:
        if self.kept is None:
            self.kept = run()
        return self.kept


@cheat("inputs", ("inaccurate", "error"), r".", passes=FORWARD)
class NamesExpandedTensors(Plain):
    """Names one key and one value expanded to all in `Calls.inputs`."""

    kept: Tensor | None = None

    def prepare(self, case: Any, inputs: Any) -> Any:
        like = inputs.k_bhsd
        decoy = replace(
            inputs,
            **{
                name: getattr(inputs, name)[:, :, :1].clone().expand_as(like) for name in ("q_bhsd", "k_bhsd", "v_bhsd")
            },
        )
        return replace(super().prepare(case, inputs), inputs=decoy)

    def forward(self, run: Run) -> Tensor:
        if self.kept is None:
            self.kept = run()
        return self.kept


@cheat("inputs", ("inaccurate", "error"), r"(?i)grad|\bout\b", passes=BOTH)
class TurnsGradientsOff(Plain):
    """Sets requires_grad of its inputs to False after its first call, so that forwards save nothing."""

    done = False

    def forward(self, run: Run) -> Tensor:
        out = run()
        if not self.done:
            self.done = True
            for one in self.inputs.qkv:
                one.requires_grad_(False)
        return out


@cheat("inputs", "inaccurate", WRONG, passes=FORWARD)
class SharesMemoryWithItsResult(Plain):
    """Returns its output in the memory of v, whose next change changes it."""

    def forward(self, run: Run) -> Tensor:
        out = run()
        return self.inputs.v_bhsd.data.copy_(out)


@cheat("inputs", "inaccurate", r"k of the inputs .* is float32, given was bfloat16", passes=FORWARD, case=LOW)
class WidensKeysOnce(Plain):
    """Converts k and v to float32 in `prepare`, and names these as what its calls read."""

    def prepared(self, case: Any, inputs: Any) -> Any:
        return replace(inputs, k_bhsd=inputs.k_bhsd.float(), v_bhsd=inputs.v_bhsd.float())

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q.float(), k, v).to(q.dtype)
