"""Backends whose results depend on more than their inputs: on chance, the call, or the batch."""

import random
from collections.abc import Callable
from dataclasses import replace

import torch
from fakes import Honest

from attn_exp.attention.formula import formula, hidden_keys
from attn_exp.attention.inputs import Inputs
from attn_exp.backends.base import Calls, calls_of
from attn_exp.core.case.case import Case

# Calls since the bits of results began to be compared; None before. A test sets it.
CALLS: list[int | None] = [None]


def compared_call() -> int | None:
    """The number of this call among those that are compared, 1 for the first; None for all others."""
    if CALLS[0] is not None:
        CALLS[0] += 1
    return CALLS[0]


class Chunked(Honest):
    """The formula in float32 with sums over chunks of the keys, in an order that `order` chooses."""

    def order(self, case: Case, chunks: int) -> list[int]:
        return list(range(chunks))

    def count(self, case: Case) -> int:
        return 4

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        hidden = hidden_keys(case, 0, case.q_len, inputs.q_bhsd.device)

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            scores = (q @ k.mT * case.head_dim**-0.5).masked_fill(hidden, float("-inf"))
            weights, chunks = torch.softmax(scores, -1), self.count(case)
            parts = [one @ two for one, two in zip(weights.chunk(chunks, -1), v.chunk(chunks, -2), strict=True)]
            total = torch.zeros_like(parts[0])
            for index in self.order(case, len(parts)):
                total = total + parts[index]
            return total

        return calls_of(attention, inputs)


class Atomics(Chunked):
    """Chunks are added in the order in which they happen to be ready, as atomic additions are."""

    def order(self, case: Case, chunks: int) -> list[int]:
        return random.sample(range(chunks), chunks)


class SplitByQueries(Chunked):
    """Decoding splits the keys into more chunks than a prefill."""

    def count(self, case: Case) -> int:
        return 16 if case.q_len == 1 else 4


class SplitByBatch(Chunked):
    """A small batch is split into more chunks, so that more processors have work."""

    def count(self, case: Case) -> int:
        return 8 if case.batch == 1 else 1


class FirstRowOtherwise(Honest):
    """The first row of a batch is computed in float64, and all others are not."""

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        hidden = hidden_keys(case, 0, case.q_len, inputs.q_bhsd.device)

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            first = formula(case, hidden, *(one[:1].double() for one in (q, k, v))).to(q.dtype)
            return torch.cat([first, formula(case, hidden, q, k, v)[1:]])

        return calls_of(attention, inputs)


class _Changed(Honest):
    """Changes the output of compared calls."""

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        calls = super().prepare(case, inputs)

        def forward() -> torch.Tensor:
            out, number = calls.forward(), compared_call()
            if number is not None:
                self.change(out.detach().view(torch.int32), number)
            return out

        return replace(calls, forward=forward)

    def change(self, bits: torch.Tensor, number: int) -> None:
        raise NotImplementedError


class OneBitInCall37(_Changed):
    """The last bit of one element differs in one call."""

    def change(self, bits: torch.Tensor, number: int) -> None:
        if number == 37:
            bits[0, 1, 2, 3] ^= 1


class MinusZeroInCall37(_Changed):
    """An element is 0.0, and -0.0 in one call."""

    def change(self, bits: torch.Tensor, number: int) -> None:
        bits[0, 0, 0, 0] = -(1 << 31) if number == 37 else 0


class OtherNanInCall37(_Changed):
    """An element is NaN, of another payload in one call."""

    def change(self, bits: torch.Tensor, number: int) -> None:
        bits[0, 0, 0, 0] = 0x7FC00002 if number == 37 else 0x7FC00001


class NanInCall37(_Changed):
    """An element is NaN in one call, and a number in all others."""

    def change(self, bits: torch.Tensor, number: int) -> None:
        if number == 37:
            bits[0, 0, 0, 0] = 0x7FC00001


class RaisesInCall50(_Changed):
    """An exception in one call."""

    def change(self, bits: torch.Tensor, number: int) -> None:
        if number == 50:
            raise RuntimeError("the fiftieth call")


class NoMemoryInCall50(_Changed):
    """The memory does not hold one call's result."""

    def change(self, bits: torch.Tensor, number: int) -> None:
        if number == 50:
            raise torch.OutOfMemoryError("no room")


class GradientsByChance(Honest):
    """dk gets another last bit by chance."""

    def __init__(self, name: str, deterministic: bool = False) -> None:
        super().__init__(name)

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        calls = super().prepare(case, inputs)

        def backward(out: torch.Tensor) -> Callable[[], tuple[torch.Tensor, ...]]:
            right = calls.backward(out)

            def call() -> tuple[torch.Tensor, ...]:
                dq, dk, dv = right()
                dk.view(torch.int32)[0, 0, 1, 2] ^= random.randrange(2)
                return dq, dk, dv

            return call

        return replace(calls, backward=backward)
