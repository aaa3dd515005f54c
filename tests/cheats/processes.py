"""Processes of a backend's own: beside the one that it was given, or for what is not timed."""

import os
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from cheats.corpus import FORWARD, case_of, cheat, honest
from cheats.gradients import slow_weights
from cheats.gradients_late import gradients
from cheats.ways import Plain, Run, Tensor, attend, later

LONG = case_of(256, batch=1)


def _serve(connection: Connection, work: Run) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            connection.recv()
        except EOFError:
            os._exit(0)
        with torch.no_grad():
            work()
        connection.send(None)


class Helper:
    """A process that waits on a pipe, and does its work once for each request; tensors are in shared memory."""

    def __init__(self, work: Run) -> None:
        context = get_context("fork")
        self.connection, other = context.Pipe()
        process = context.Process(target=_serve, args=(other, work), daemon=True)
        process.start()
        other.close()

        def end() -> None:
            process.kill()
            process.join()

        later(end)
        self.pending = 0

    def ask(self) -> None:
        """Let it begin."""
        self.pending += 1
        self.connection.send(None)

    def wait(self) -> None:
        """Wait until all is done that was asked for."""
        while self.pending:
            self.connection.recv()
            self.pending -= 1


class _Attention(torch.autograd.Function):
    """Gets the backward's weights from a function, which is asked again if they are not kept."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, weights: Callable[..., Tensor], keeps: bool) -> Tensor:
        ctx.weights, ctx.keeps, ctx.kept = weights, keeps, None
        ctx.save_for_backward(q, k, v)
        return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        q, k, v = ctx.saved_tensors
        p = ctx.weights(q, k) if ctx.kept is None else ctx.kept
        ctx.kept = p if ctx.keeps else None
        return *gradients(p, q, k, v, d_out), None, None


class _WeightsElsewhere(Plain):
    """Lets a process compute the weights that its backward needs, and waits for it."""

    keeps = False

    def prepared(self, case: Any, inputs: Any) -> Any:
        q, k, _ = inputs.qkv
        self.q, self.k = (torch.empty_like(one.detach()).share_memory_() for one in (q, k))
        self.p = (self.q @ self.k.mT).share_memory_()
        self.helper = Helper(lambda: self.p.copy_(slow_weights(self.q, self.k)))
        return inputs

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        self.q.copy_(q)
        self.k.copy_(k)
        self.helper.ask()
        self.helper.wait()
        return self.p.clone()

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Attention.apply(q, k, v, self.weights, self.keeps)


@cheat(
    "threads", "implausible", "with the CPU time of other processes a forward and its first backward take", case=LONG
)
class WeightsFromAProcessOnce(_WeightsElsewhere):
    """Lets a process compute the weights in the first backward of a forward, and keeps them for repeated ones."""

    keeps = True


@honest(case=LONG)
class WeightsFromAProcess(_WeightsElsewhere):
    """Lets a process compute the weights in each backward, and waits for it."""


@cheat("threads", "implausible", "processes compute for .* after a call of .* has returned", passes=FORWARD, case=LONG)
class TidiesUpInAProcess(Plain):
    """Returns the right output, and lets a process do a part of its work, here of no use, when nobody times it."""

    def prepared(self, case: Any, inputs: Any) -> Any:
        q, k, _ = (one.detach().clone().share_memory_() for one in inputs.qkv)
        self.helper = Helper(lambda: slow_weights(q, k))
        return inputs

    def forward(self, run: Run) -> Tensor:
        self.helper.wait()
        out: Tensor = run()
        self.helper.ask()
        return out


@honest(passes=FORWARD, case=LONG)
class HalfInAProcess(Plain):
    """Lets a process compute half of the heads, and waits for it."""

    def prepared(self, case: Any, inputs: Any) -> Any:
        self.half = [torch.empty_like(one.detach()[:, :2]).share_memory_() for one in inputs.qkv]
        self.out = torch.empty_like(self.half[0]).share_memory_()
        self.helper = Helper(lambda: self.out.copy_(attend(case, *self.half)))
        return inputs

    def forward(self, run: Run) -> Tensor:
        for into, one in zip(self.half, self.inputs.qkv, strict=True):
            into.copy_(one[:, :2])
        self.helper.ask()
        rest = attend(self.case, *(one[:, 2:] for one in self.inputs.qkv))
        self.helper.wait()
        return torch.cat([self.out, rest], 1)
