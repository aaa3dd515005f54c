"""Results that are no results yet when the call returns, or no tensors of the right kind."""

import threading
import time
from typing import Any

import torch

from cheats.corpus import FORWARD, cheat
from cheats.ways import Plain, Run, later

FORM = r"\bout\b"
# Longer than a judge needs to copy a result on a busy machine: nobody shall find out by luck.
DELAY_S = 0.05


def start(fill: Run) -> None:
    """Run this in a thread, which `restore` waits for."""
    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    later(thread.join)


class _Deferred(torch.Tensor):
    """Runs its call when an operator first looks at it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def value(one: Any) -> Any:
            return one.run() if isinstance(one, _Deferred) else one

        return func(*(value(one) for one in args), **(kwargs or {}))


@cheat("laziness", "inaccurate", FORM, passes=FORWARD, seen=("reference-kernels#162", "wafer"))
class LazySubclass(Plain):
    """Returns a subclass of torch.Tensor that computes when it is looked at."""

    def forward(self, run: Run) -> Any:
        out = torch.empty_like(self.inputs.d_out).as_subclass(_Deferred)
        out.run = run
        return out


@cheat("laziness", "inaccurate", FORM, passes=FORWARD, seen="wafer")
class InAnotherThread(Plain):
    """Returns an empty tensor that a thread fills later."""

    def forward(self, run: Run) -> Any:
        out = torch.full_like(self.inputs.d_out, 0.1)

        def fill() -> None:
            time.sleep(DELAY_S)
            out.copy_(run())

        start(fill)
        return out
