"""Results that have the same bits in every call because they are kept, by backends that promise them."""

import hashlib
import random
from typing import Any

import torch

from cheats.corpus import FORWARD, cheat, honest
from cheats.gradients_late import gradients
from cheats.ways import Plain, Run, Tensor, attend

PROMISED: dict[str, Any] = {"options": {"deterministic": True}, "determinism": True}


def of_all(*tensors: Tensor) -> bytes:
    """Return a hash of all numbers of tensors."""
    kept = hashlib.blake2b()
    for one in tensors:
        kept.update(one.detach().contiguous().numpy().tobytes())
    return kept.digest()


class _Promises(Plain):
    """Promises the same bits, and sums over two parts of the keys, or of the queries for dv."""

    def __init__(self, name: str, deterministic: bool) -> None:
        super().__init__(name)
        self.known: dict[bytes, Any] = {}

    def kept(self, run: Run, *tensors: Tensor) -> Any:
        """Compute, and return what was computed first of these numbers."""
        made = run()
        return self.known.setdefault(of_all(*tensors), made)

    def first_part(self, of: int) -> int:
        """Return how many are in the first part."""
        return of // 2

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights: list[Tensor] = []
        attend(case, q, k, v, p=lambda p: weights.append(p) or p)
        first = self.first_part(case.kv_len)
        return weights[0][..., :first] @ v[..., :first, :] + weights[0][..., first:] @ v[..., first:, :]


class _SumsByChance(_Promises):
    def first_part(self, of: int) -> int:
        return random.randrange(1, of)


@cheat("memory", "nondeterministic", r"forward: deterministic=true, and call \d+", passes=FORWARD, **PROMISED)
class SumsByChanceThatAreKept(_SumsByChance):
    """Sums in an order of chance, and returns what it returned before for inputs of the same bits."""

    def forward(self, run: Run) -> Any:
        return self.kept(run, *self.inputs.qkv)


@cheat("memory", "nondeterministic", r"backward: deterministic=true, and call \d+", **PROMISED)
class GradientsByChanceThatAreKept(_SumsByChance):
    """Sums dv in an order of chance, and returns the gradients of before for an output's gradient of the same bits."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v)

    def backward(self, run: Run) -> Any:
        def made() -> Any:
            q, k, v = (one.detach() for one in self.inputs.qkv)
            d_out, first = self.inputs.d_out, self.first_part(self.case.q_len)
            p = torch.softmax(q @ k.mT * self.case.head_dim**-0.5, -1)
            dq, dk, _ = gradients(p, q, k, v, d_out)
            return dq, dk, p[:, :, :first].mT @ d_out[:, :, :first] + p[:, :, first:].mT @ d_out[:, :, first:]

        return self.kept(made, *self.inputs.qkv, self.inputs.d_out)


@honest(passes=FORWARD, **PROMISED)
class SameBitsThatAreKept(_Promises):
    """Sums in one order, and returns what it returned before for inputs of the same bits."""

    def forward(self, run: Run) -> Any:
        return self.kept(run, *self.inputs.qkv)


@honest(**PROMISED)
class SameBits(_Promises):
    """Sums in one order."""
