"""Honest backends that do something unusual: what must not be taken for a cheat."""

import weakref
from typing import Any

import torch

from attn_exp.backends.base import Calls, calls_of
from cheats.corpus import FORWARD, case_of, honest
from cheats.ways import Plain, Run, Tensor, attend

HALF = case_of(256, dtype="bfloat16", head_dim=64, value_dim=64, causal=True)


@honest()
class AsWritten(Plain):
    """Computes the formula as written."""


@honest(case=HALF)
class AsWrittenInBf16(Plain):
    """Computes the formula as written, in bf16."""


@honest(case=case_of(256, dtype="bfloat16", softcap=50.0, causal=True, window=100))
class Capped(Plain):
    """Computes a softcap and a window."""


@honest(case=case_of(256, batch=1, lengths=(100, 28, 128), causal=True))
class Packed(Plain):
    """Computes packed sequences under one mask."""


@honest(case=case_of(q_len=160, causal=True), passes=FORWARD)
class Keyless(Plain):
    """Returns zeros for queries that see no key."""


@honest(case=HALF)
class InFloat32(Plain):
    """Computes bf16 in float32 and rounds once."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q.float(), k.float(), v.float()).to(q.dtype)


@honest()
class InFloat64(Plain):
    """Computes fp32 in float64 and rounds once."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q.double(), k.double(), v.double()).to(q.dtype)


@honest()
class StridedOutput(Plain):
    """Returns the output as a view of (batch, length, heads, dim)."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v).transpose(1, 2).contiguous().transpose(1, 2)


@honest(case=case_of(layout="bshd"))
class OtherLayout(Plain):
    """Computes tensors in the layout (batch, length, heads, dim)."""


@honest(passes=FORWARD)
class SliceOfALargerBuffer(Plain):
    """Returns a slice of a larger buffer, whose rest is never written."""

    def forward(self, run: Run) -> Tensor:
        case = self.case
        buffer = torch.empty(case.batch, case.q_heads, case.q_len + 64, 2 * case.value_dim)
        buffer[:, :, : case.q_len, : case.value_dim] = run()
        return buffer[:, :, : case.q_len, : case.value_dim]


@honest(passes=FORWARD)
class RingOfBuffers(Plain):
    """Writes its outputs into three buffers in turn."""

    def prepared(self, case: Any, inputs: Any) -> Any:
        self.ring = [torch.empty_like(inputs.d_out) for _ in range(3)]
        return inputs

    def forward(self, run: Run) -> Tensor:
        self.ring.append(self.ring.pop(0))
        return self.ring[-1].copy_(run())


@honest(passes=FORWARD)
class TheSameTensorEachTime(Plain):
    """Returns the same tensor object from every call, newly written."""

    def prepared(self, case: Any, inputs: Any) -> Any:
        self.buffer = torch.empty_like(inputs.d_out)
        return inputs

    def forward(self, run: Run) -> Tensor:
        return self.buffer.copy_(run())


@honest(passes=FORWARD)
class Workspace(Plain):
    """Computes in place in a workspace that it allocates once."""

    def prepared(self, case: Any, inputs: Any) -> Any:
        self.space = torch.empty(case.batch, case.q_heads, case.q_len, case.kv_len)
        return inputs

    def forward(self, run: Run) -> Tensor:
        q, k, v = self.inputs.qkv
        torch.matmul(q, k.mT, out=self.space)
        self.space.mul_(self.case.head_dim**-0.5).sub_(self.space.amax(-1, keepdim=True)).exp_()
        self.space.div_(self.space.sum(-1, keepdim=True))
        return self.space @ v


@honest()
class GradientsInBuffers(Plain):
    """Writes gradients into buffers that it allocates once."""

    made: Any = None

    def backward(self, run: Run) -> Any:
        found = run()
        self.made = self.made or tuple(torch.empty_like(one) for one in found)
        for into, one in zip(self.made, found, strict=True):
            into.copy_(one)
        return self.made


@honest()
class ConvertsInPrepare(Plain):
    """Copies its inputs to another layout in `prepare`, and names the copies in `Calls.inputs`."""

    def prepare(self, case: Any, inputs: Any) -> Calls:
        own = inputs.laid_out("bshd")

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(case, q, k, v)

        return calls_of(attention, own)


@honest(case=case_of(kv_len=250), passes=FORWARD)
class PadsAndMasks(Plain):
    """Pads keys to whole tiles and masks the padding."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (torch.nn.functional.pad(one, (0, 0, 0, 6)) for one in (k, v))
        return attend(case, q, k, v, mask=torch.arange(256)[None].expand(case.q_len, -1) >= 250)


@honest()
class OneOutputForAllCalls(Plain):
    """Writes each forward's output and statistics to one place, which its backward reads, as a CUDA graph does."""

    def prepare(self, case: Any, inputs: Any) -> Calls:
        q, k, v = inputs.qkv
        scale, out = case.head_dim**-0.5, torch.empty_like(inputs.d_out)
        lse = torch.empty(*q.shape[:-1], 1)

        @torch.no_grad()
        def forward() -> Tensor:
            scores = q @ k.mT * scale
            lse.copy_(scores.logsumexp(-1, keepdim=True))
            return out.copy_((scores - lse).exp() @ v)

        @torch.no_grad()
        def gradients() -> Any:
            p, d_out = (q @ k.mT * scale - lse).exp(), inputs.d_out
            ds = p * (d_out @ v.mT - (d_out * out).sum(-1, keepdim=True)) * scale
            return ds @ k, ds.mT @ q, p.mT @ d_out

        return Calls(forward=forward, backward=lambda _: gradients, inputs=inputs)


class TwoGraphsAtATime(Plain):
    """Has no memory for a third graph while two are alive."""

    most = 2

    def prepared(self, case: Any, inputs: Any) -> Any:
        self.alive: Any = weakref.WeakSet()
        return inputs

    def forward(self, run: Run) -> Tensor:
        if len(self.alive) >= self.most:
            raise torch.OutOfMemoryError("another graph does not fit")
        out = run()
        self.alive.add(out)
        return out


@honest()
class OneGraphAtATime(TwoGraphsAtATime):
    """Has no memory for a second graph while one is alive."""

    most = 1
