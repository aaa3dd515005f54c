"""Results that are no results yet when the call returns, or no tensors of the right kind."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from cheats.corpus import FORWARD, cheat
from cheats.ways import Plain, Run, Tensor, attend, later

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


class _Quiet(torch.Tensor):
    """A subclass that does nothing."""


@cheat("laziness", "inaccurate", FORM, passes=FORWARD, seen="reference-kernels#162")
class QuietSubclass(Plain):
    """Returns the right numbers in a subclass of torch.Tensor, which could do anything when it is looked at."""

    def forward(self, run: Run) -> Any:
        return run().as_subclass(_Quiet)


@cheat("laziness", "inaccurate", FORM, passes=FORWARD, seen="reference-kernels#162")
class SubclassAfterTheFirst(Plain):
    """Returns a tensor in its first call and lazy subclasses later."""

    calls = 0

    def forward(self, run: Run) -> Any:
        self.calls += 1
        if self.calls == 1:
            return run()
        out = torch.empty_like(self.inputs.d_out).as_subclass(_Deferred)
        out.run = run
        return out


@cheat("laziness", "inaccurate", FORM, passes=FORWARD, seen="reference-kernels#162")
class OverriddenOnTheInstance(Plain):
    """Returns a plain tensor whose own methods `detach` and `clone` compute when they are called."""

    def forward(self, run: Run) -> Any:
        out = torch.empty_like(self.inputs.d_out)

        def compute() -> Tensor:
            torch.Tensor.copy_(out, run())
            return out

        out.detach = out.clone = out.contiguous = compute
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


@cheat("laziness", "inaccurate", FORM, passes=FORWARD, seen="wafer")
class InAThreadPool(Plain):
    """Computes the first call itself, and later ones in a pool that it does not wait for."""

    def prepared(self, case: Any, inputs: Any) -> Any:
        self.pool, self.calls = ThreadPoolExecutor(1), 0
        later(lambda: self.pool.shutdown(cancel_futures=True))
        return inputs

    def forward(self, run: Run) -> Any:
        self.calls += 1
        if self.calls == 1:
            return run()
        out = torch.zeros_like(self.inputs.d_out)

        def fill() -> None:
            time.sleep(DELAY_S)
            out.copy_(run())

        self.pool.submit(fill)
        return out


@cheat("laziness", "inaccurate", FORM, passes=FORWARD)
class AFuture(Plain):
    """Returns a Future instead of a tensor."""

    def prepared(self, case: Any, inputs: Any) -> Any:
        self.pool = ThreadPoolExecutor(1)
        later(lambda: self.pool.shutdown(cancel_futures=True))
        return inputs

    def forward(self, run: Run) -> Any:
        return self.pool.submit(run)


@cheat("laziness", "inaccurate", FORM, passes=FORWARD)
class AGenerator(Plain):
    """Returns a generator that would yield the output."""

    def forward(self, run: Run) -> Any:
        return (one for one in [run])


@cheat("laziness", "inaccurate", FORM, passes=FORWARD)
class AFunction(Plain):
    """Returns the function that would compute the output."""

    def forward(self, run: Run) -> Any:
        return run


@cheat("laziness", "inaccurate", FORM, passes=FORWARD)
class FilledInTheNextCall(Plain):
    """Fills the output of each call at the beginning of the next one."""

    before: Tensor | None = None
    calls = 0

    def forward(self, run: Run) -> Any:
        self.calls += 1
        if self.calls == 1:
            return run()
        if self.before is not None:
            self.before.copy_(run())
        self.before = torch.zeros_like(self.inputs.d_out)
        return self.before


@cheat("laziness", "inaccurate", r"\bd[qkv]\b", seen="reference-kernels#162")
class LazyGradients(Plain):
    """Returns gradients as subclasses that compute when they are looked at."""

    def backward(self, run: Run) -> Any:
        gradients = []
        for index, like in enumerate(self.inputs.qkv):
            one = torch.empty_like(like).as_subclass(_Deferred)
            one.run = lambda index=index: run()[index]
            gradients.append(one)
        return tuple(gradients)


@cheat("laziness", "inaccurate", r"\bd[qkv]\b", seen="wafer")
class GradientsInAnotherThread(Plain):
    """Returns gradients that a thread fills later."""

    def backward(self, run: Run) -> Any:
        made = tuple(torch.zeros_like(one).detach() for one in self.inputs.qkv)

        def fill() -> None:
            time.sleep(DELAY_S)
            with torch.no_grad():
                for into, one in zip(made, run(), strict=True):
                    into.copy_(one)

        start(fill)
        return made


@cheat("laziness", "inaccurate", FORM, passes=FORWARD)
class ComputedByAHalf(Plain):
    """Computes half of the rows, and lets a thread compute the others after it has returned."""

    def forward(self, run: Run) -> Any:
        q, k, v = (one.clone() for one in self.inputs.qkv)
        half = self.case.q_len // 2
        out = torch.zeros_like(self.inputs.d_out)
        out[:, :, :half] = attend(self.case, q[:, :, :half], k, v)

        def fill() -> None:
            time.sleep(DELAY_S)
            out[:, :, half:] = attend(self.case, q[:, :, half:], k, v)

        start(fill)
        return out
