"""Honest backends that compute in an unusual way."""

import hashlib
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from attn_exp.attention.autograd import autograd_backward
from attn_exp.backends.base import Calls
from attn_exp.core.request import Compile
from cheats.corpus import BOTH, FORWARD, case_of, honest
from cheats.ways import Plain, Run, Tensor, attend, hidden, later, softmax


def _ways(case: Any, q: Tensor, k: Tensor, v: Tensor) -> list[Run]:
    """Three ways to compute one thing."""
    return [
        lambda: attend(case, q, k, v),
        lambda: scaled_dot_product_attention(q, k, v),
        lambda: attend(case, q.transpose(-1, -2).contiguous().mT, k, v),
    ]


@honest()
class TunesItself(Plain):
    """Tries three algorithms in its first calls and stays with the fastest."""

    def prepared(self, case: Any, inputs: Any) -> Any:
        self.times: list[float] = []
        return inputs

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ways = _ways(case, q, k, v)
        if len(self.times) == len(ways):
            return ways[self.times.index(min(self.times))]()
        began = time.perf_counter()
        out = ways[len(self.times)]()
        self.times.append(time.perf_counter() - began)
        return out


@honest()
class ChoosesAtRandom(Plain):
    """Chooses one of three algorithms at random in each call."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return random.choice(_ways(case, q, k, v))()


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        p = softmax(q @ k.mT * scale)
        ctx.save_for_backward(q, k, v, p)
        ctx.scale = scale
        return p @ v

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        q, k, v, p = ctx.saved_tensors
        dp = d_out @ v.mT
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * ctx.scale
        return ds @ k, ds.mT @ q, p.mT @ d_out, None


@honest()
class OwnFunction(Plain):
    """Has its own torch.autograd.Function."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Own.apply(q, k, v, case.head_dim**-0.5)


@torch.library.custom_op("cheats::attention", mutates_args=())
def _operator(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return torch.softmax(q @ k.mT * scale, -1) @ v


@honest(passes=FORWARD)
class OwnOperator(Plain):
    """Is a custom operator."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _operator(q, k, v, case.head_dim**-0.5)


@honest(case=case_of(200, causal=True))
class InChunks(Plain):
    """Computes chunks of 64 queries."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = hidden(case, q.device)
        parts = zip(q.split(64, 2), mask.split(64, 0), strict=True)
        return torch.cat([attend(case, part, k, v, mask=hides) for part, hides in parts], 2)


@honest(case=case_of(256))
class Online(Plain):
    """Computes an online softmax over tiles of 64 keys."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        top, total, out = None, 0.0, 0.0
        for keys, values in zip(k.split(64, 2), v.split(64, 2), strict=True):
            s = q @ keys.mT * case.head_dim**-0.5
            most = s.amax(-1, keepdim=True).detach()
            new = most if top is None else torch.maximum(top, most)
            factor = 1.0 if top is None else (top - new).exp()
            e = (s - new).exp()
            total, out, top = total * factor + e.sum(-1, keepdim=True), out * factor + e @ values, new
        return out / total


@honest(passes=FORWARD)
class KeysPermuted(Plain):
    """Computes with keys and values in another order, drawn anew in each call."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        order = torch.randperm(case.kv_len)
        return attend(case, q, k[:, :, order], v[:, :, order])


@honest(case=case_of(kv_heads=2))
class GroupsFolded(Plain):
    """Folds the queries of a group into rows of one head."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = q.reshape(case.batch, case.kv_heads, -1, case.head_dim)
        return (softmax(rows @ k.mT * case.head_dim**-0.5) @ v).reshape(case.batch, case.q_heads, case.q_len, -1)


@honest()
class Recomputes(Plain):
    """Saves nothing and computes the forward again in the backward."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(lambda *qkv: attend(case, *qkv), q, k, v, use_reentrant=False)


@honest()
class ExtraWork(Plain):
    """Does work that nobody asked for, the same in each call."""

    def forward(self, run: Run) -> Tensor:
        torch.ones(64, 64) @ torch.ones(64, 64)
        return run()


@honest(passes=FORWARD)
class InAPoolThatIsJoined(Plain):
    """Computes rows of the batch in a pool of as many threads as PyTorch has, and waits for them."""

    def prepared(self, case: Any, inputs: Any) -> Any:
        self.pool = ThreadPoolExecutor(torch.get_num_threads())
        later(self.pool.shutdown)
        return inputs

    def forward(self, run: Run) -> Tensor:
        q, k, v = (one.split(1) for one in self.inputs.qkv)
        parts = self.pool.map(lambda qkv: attend(self.case, *qkv), zip(q, k, v, strict=True))
        return torch.cat(list(parts))


@honest(passes=FORWARD)
class SleepsNowAndThen(Plain):
    """Sleeps for up to 2 ms at random."""

    def forward(self, run: Run) -> Tensor:
        time.sleep(random.random() * 0.002)
        return run()


@honest(passes=FORWARD)
class CachedByContent(Plain):
    """Keeps outputs by a hash of all of q, k and v: always right, and of no use."""

    def prepared(self, case: Any, inputs: Any) -> Any:
        self.known: dict[bytes, Tensor] = {}
        return inputs

    def forward(self, run: Run) -> Tensor:
        key = hashlib.sha256(b"".join(one.numpy().tobytes() for one in self.inputs.qkv)).digest()
        if key not in self.known:
            self.known[key] = run()
        return self.known[key].clone()


@honest(compile=Compile(mode="default"), passes=FORWARD)
class Compiled(Plain):
    """Is compiled by torch.compile."""


@honest(case=case_of(causal=True))
class BySdpa(Plain):
    """Calls PyTorch's scaled_dot_product_attention."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)


@honest()
class ByEinsum(Plain):
    """Writes the products as einsum, with scaled queries."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = torch.einsum("bhqd,bhkd->bhqk", q * case.head_dim**-0.5, k).softmax(-1)
        return torch.einsum("bhqk,bhkd->bhqd", p, v)


@honest()
class InBaseTwo(Plain):
    """Computes the softmax with powers of two, as FlashAttention does."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def weights(s: Tensor) -> Tensor:
            e = torch.exp2((s - s.amax(-1, keepdim=True)) * 1.4426950408889634)
            return e / e.sum(-1, keepdim=True)

        return attend(case, q, k, v, weights=weights)


@honest(passes=BOTH)
class OwnLeaves(Plain):
    """Computes gradients of leaves of its own that share the inputs' memory, and names them."""

    def prepare(self, case: Any, inputs: Any) -> Calls:
        own = replace(
            inputs,
            **{name: getattr(inputs, name).detach().requires_grad_() for name in ("q_bhsd", "k_bhsd", "v_bhsd")},
        )

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(case, q, k, v)

        return Calls(
            forward=lambda: attention(*own.qkv),
            backward=lambda out: autograd_backward(own, out),
            attention=attention,
            inputs=own,
        )


@honest(case=case_of(kv_heads=1), passes=FORWARD)
class OneKeyHead(Plain):
    """Lets broadcasting serve one key-value head to all."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softmax(q @ k.mT * case.head_dim**-0.5) @ v
