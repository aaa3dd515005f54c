"""Backends that break down in a later judgement: a status with its reason, and the next job is measured."""

import os
import time
from typing import Any

import torch

from cheats.corpus import BOTH, FORWARD, cheat
from cheats.ways import Plain, Run, Tensor


class _OnceChanged(Plain):
    """Does something else as soon as an input is no longer what it was in `prepare`."""

    def prepared(self, case: Any, inputs: Any) -> Any:
        self.first = [one.detach().clone() for one in (*inputs.qkv, inputs.d_out)]
        return inputs

    def changed(self) -> bool:
        now = (*self.inputs.qkv, self.inputs.d_out)
        return any(not torch.equal(one, other) for one, other in zip(self.first, now, strict=True))

    def otherwise(self, run: Run) -> Any:
        raise NotImplementedError

    def forward(self, run: Run) -> Any:
        return self.otherwise(run) if self.changed() else run()


@cheat("bad input", "error", r"RuntimeError: no second backward", passes=BOTH)
class RaisesInALaterBackward(Plain):
    """Raises in every backward after its first."""

    calls = 0

    def backward(self, run: Run) -> Any:
        self.calls += 1
        if self.calls > 1:
            raise RuntimeError("no second backward")
        return run()


@cheat("bad input", ("inaccurate", "error"), r"shape", passes=FORWARD)
class AnotherShapeLater(_OnceChanged):
    """Returns another shape when its inputs have changed."""

    def otherwise(self, run: Run) -> Any:
        return run()[:, :, :-1]


@cheat("bad input", "out_of_memory", r".", passes=FORWARD)
class AsksForEverythingLater(_OnceChanged):
    """Allocates more than any machine has when its inputs have changed."""

    def otherwise(self, run: Run) -> Tensor:
        return run() + torch.empty(1 << 50, dtype=torch.int8).sum()


@cheat("bad input", "timeout", r"took longer than", passes=FORWARD, worker=True)
class WaitsForEver(_OnceChanged):
    """Waits for ever when its inputs have changed."""

    def otherwise(self, run: Run) -> Any:
        time.sleep(3600)


@cheat("bad input", "crashed", r"worker", passes=FORWARD, worker=True)
class KillsItsProcess(_OnceChanged):
    """Ends its process when its inputs have changed."""

    def otherwise(self, run: Run) -> Any:
        os._exit(3)
