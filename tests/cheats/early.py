"""Backends that compute when nobody times them: as soon as their inputs are changed, before the call."""

import random
import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cheats.clock import CHANGED, FOUND
from cheats.corpus import FORWARD, cheat
from cheats.ways import Plain, Run, Tensor, attend, later, patch

WORDS = CHANGED + "|mode|trace|profile"


class _Early(Plain):
    """Returns what `compute` made before the call, and computes only if nothing was made."""

    ready: Tensor | None = None
    busy = False

    def compute(self) -> None:
        """Compute the output of the present inputs, unless this is such a computation."""
        if not self.busy and hasattr(self, "inputs"):
            self.busy = True
            with torch.no_grad():
                self.ready = attend(self.case, *(one.detach() for one in self.inputs.qkv))
            self.busy = False

    def forward(self, run: Run) -> Any:
        self.busy = True
        out, self.ready = run() if self.ready is None else self.ready, None
        self.busy = False
        return out


@cheat("clock", FOUND, WORDS, passes=FORWARD)
class PatchesTheRenewal(_Early):
    """Replaces torch.bitwise_xor, with which signs are flipped, by one that then computes the next output, untimed."""

    def prepared(self, case: Any, inputs: Any) -> Any:
        real = torch.bitwise_xor

        def xor(*args: Any, **kwargs: Any) -> Tensor:
            made = real(*args, **kwargs)
            self.compute()
            return made

        patch(torch, "bitwise_xor", xor)
        return inputs


class _Watching(TorchDispatchMode):
    """Computes after every operator that flips bits, and forgets that after one that writes anew."""

    def __init__(self, backend: _Early) -> None:
        super().__init__()
        self.backend = backend

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if "bitwise_xor" in str(func):
            self.backend.compute()
        elif "copy_" in str(func):
            self.backend.ready = None
        return made


@cheat("clock", FOUND, WORDS, passes=FORWARD)
class ModeThatComputes(_Early):
    """Leaves a dispatch mode on that computes the next output as soon as signs are flipped, untimed."""

    def prepared(self, case: Any, inputs: Any) -> Any:
        mode = _Watching(self)
        mode.__enter__()
        later(lambda: mode.__exit__(None, None, None))
        return inputs


@cheat("clock", FOUND, WORDS, passes=FORWARD)
class ProfilesItsJudge(_Early):
    """Sets a profile function that computes the next output when a function called `before` returns, untimed."""

    def prepared(self, case: Any, inputs: Any) -> Any:
        def watch(frame: Any, event: str, argument: Any) -> None:
            if event == "return" and frame.f_code.co_name == "before":
                self.compute()

        sys.setprofile(watch)
        later(lambda: sys.setprofile(None))
        return inputs


@cheat("clock", FOUND, WORDS, passes=FORWARD)
class TracesItsJudge(_Early):
    """Sets a trace function that computes the next output when a function called `before` returns, untimed."""

    def prepared(self, case: Any, inputs: Any) -> Any:
        def inside(frame: Any, event: str, argument: Any) -> Any:
            if event == "return":
                self.compute()
            return inside

        old = sys.gettrace()
        sys.settrace(lambda frame, event, argument: inside if frame.f_code.co_name == "before" else None)
        later(lambda: sys.settrace(old))
        return inputs


@cheat("clock", "implausible", WORDS, passes=FORWARD)
class PatchesTheDice(Plain):
    """Replaces the system's generator of random numbers, so that it knows which call is judged."""

    def prepared(self, case: Any, inputs: Any) -> Any:
        patch(random.SystemRandom, "getrandbits", lambda dice, bits: 1)
        return inputs
