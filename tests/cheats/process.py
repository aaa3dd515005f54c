"""Backends that change more of the process than its clocks: functions of torch, modes, objects, settings."""

import gc
import random
import time
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cheats.corpus import FORWARD, case_of, cheat
from cheats.ways import Plain, Run, Tensor, attend, later, patch

FOUND = ("implausible", "inaccurate", "error")

CHANGED = r"(?i)patch|replac|clock|changed"

WRONG = CHANGED + r"|\b(out|dq|dk|dv)\b"


class _PatchesTorch(Plain):
    """Replaces a function of torch with which a judge could compare."""

    what = ""

    def prepared(self, case: Any, inputs: Any) -> Any:
        patch(torch, self.what, lambda *args, **kwargs: True)
        return inputs

    def forward(self, run: Run) -> Any:
        return run() * 2


@cheat("clock", FOUND, WRONG, passes=FORWARD, seen="wafer")
class PatchesAllclose(_PatchesTorch):
    """Replaces torch.allclose by a function that says yes."""

    what = "allclose"


@cheat("clock", FOUND, WRONG, passes=FORWARD, seen="wafer")
class PatchesEqual(_PatchesTorch):
    """Replaces torch.equal by a function that says yes."""

    what = "equal"


@cheat("clock", FOUND, WRONG, passes=FORWARD)
class PatchesSoftmax(Plain):
    """Replaces torch.softmax, which the reference may use, by equal weights after its first call."""

    done = False

    def forward(self, run: Run) -> Any:
        if not self.done:
            self.done = True
            out = run()
            patch(torch, "softmax", lambda scores, dim=-1, **_: torch.full_like(scores, 1 / scores.shape[dim]))
            return out
        return self.inputs.v_bhsd.mean(2, keepdim=True).repeat(1, 1, self.case.q_len, 1)


class _Mode(TorchDispatchMode):
    """Makes every difference zero."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return torch.zeros_like(made) if "aten.sub" in str(func) and made.is_floating_point() else made


@cheat("clock", FOUND, WRONG + "|mode", passes=FORWARD)
class LeavesAModeOn(Plain):
    """Leaves a dispatch mode on that makes every difference of tensors zero."""

    def prepared(self, case: Any, inputs: Any) -> Any:
        mode = _Mode()
        mode.__enter__()
        later(lambda: mode.__exit__(None, None, None))
        return inputs

    def forward(self, run: Run) -> Any:
        return run() * 2


def _noisy(out: Tensor) -> Tensor:
    return out + 0.1 * out.abs().mean() * torch.randn_like(out)


class _Searches(Plain):
    """Looks through all objects of the process, which is slow, in its first calls."""

    calls = 0

    def expected(self) -> list[Any]:
        """Return all references, with their tolerances."""
        self.calls += 1
        if self.calls <= 4:
            self.found = [one for one in gc.get_objects() if type(one).__name__ == "Expected"]
        return self.found


@cheat("clock", FOUND, WRONG, passes=FORWARD, seen="pygpubench#7")
class SpoilsTheReference(_Searches):
    """Finds references through the garbage collector and fills them with its own output, which is noisy."""

    def forward(self, run: Run) -> Any:
        out = _noisy(run())
        for one in self.expected():
            if "out" in one.tensors and one.tensors["out"].shape == out.shape:
                one.tensors["out"].copy_(out)
        return out


@cheat("clock", FOUND, WRONG, passes=FORWARD, seen="pygpubench#7")
class CopiesTheReference(_Searches):
    """Finds the reference through the garbage collector and returns a copy of it."""

    def forward(self, run: Run) -> Any:
        for one in self.expected():
            if "out" in one.tensors and one.tensors["out"].shape == self.inputs.d_out.shape:
                return one.tensors["out"].clone()
        return torch.zeros_like(self.inputs.d_out)


@cheat("clock", FOUND, WRONG, passes=FORWARD, seen="pygpubench#7")
class WidensTheTolerances(_Searches):
    """Finds tolerances through the garbage collector and makes them enormous, for an output that is noisy."""

    def forward(self, run: Run) -> Any:
        for one in self.expected():
            for name in one.tolerances:
                one.tolerances[name] = replace(one.tolerances[name], relative=1e9, worst_row=1e9)
        return _noisy(run())


@cheat("clock", FOUND, WRONG, passes=FORWARD)
class SeedsTheDice(Plain):
    """Seeds all global generators, as if these chose the call that is judged."""

    calls = 0

    def forward(self, run: Run) -> Any:
        random.seed(0)
        torch.manual_seed(0)
        if self.calls == 0 or random.random() < 0.001:
            self.kept = run()
        self.calls += 1
        return self.kept


@cheat("clock", FOUND, WRONG, passes=FORWARD)
class SlowDtype(Plain):
    """Sets the default dtype to bf16 and computes fp32 in it, as if the reference followed."""

    def prepared(self, case: Any, inputs: Any) -> Any:
        torch.set_default_dtype(torch.bfloat16)
        later(lambda: torch.set_default_dtype(torch.float32))
        return inputs

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        low = torch.get_default_dtype()
        return attend(case, q.to(low), k.to(low), v.to(low)).to(q.dtype)


@cheat("clock", FOUND, WRONG, passes=FORWARD)
class SleepsWhileJudged(Plain):
    """Is slow and right in its first calls, and fast and stale later."""

    calls = 0

    def forward(self, run: Run) -> Any:
        self.calls += 1
        if self.calls <= 2:
            time.sleep(0.01)
            self.kept = run()
        return self.kept


@cheat("clock", "implausible", r"(?i)could|limit|fast|above|below|least|peak", passes=FORWARD, ceiling_flops=1e6)
class FasterThanTheMachine(Plain):
    """Is right, but faster than this machine's matrix product allows: here the machine is said to be slow."""


@cheat("clock", FOUND, WRONG, passes=FORWARD, case=case_of(256))
class HooksOnTensors(Plain):
    """Replaces torch.Tensor.clone by one that computes what was not computed yet."""

    pending: Any = None

    def prepared(self, case: Any, inputs: Any) -> Any:
        real, backend = torch.Tensor.clone, self

        def clone(tensor: Tensor, **kwargs: Any) -> Tensor:
            if backend.pending is not None and tensor.data_ptr() == backend.pending[0].data_ptr():
                out, run = backend.pending
                backend.pending = None
                out.copy_(run())
            return real(tensor, **kwargs)

        patch(torch.Tensor, "clone", clone)
        return inputs

    calls = 0

    def forward(self, run: Run) -> Any:
        self.calls += 1
        if self.calls == 1:
            return run()
        out = torch.zeros_like(self.inputs.d_out)
        self.pending = out, run
        return out
