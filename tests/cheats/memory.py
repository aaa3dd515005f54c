"""Outputs that were computed once and are returned again: right only as long as nothing changes."""

import tempfile
from pathlib import Path
from typing import Any

import torch

from cheats.corpus import FORWARD, case_of, cheat
from cheats.ways import Plain, Run, Tensor

OUT = r"\bout\b"


class _Memo(Plain):
    """Returns the output that it computed at the first call with this key."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.known: dict[Any, Tensor] = {}

    def key(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return None

    def forward(self, run: Run) -> Tensor:
        key = self.key(*self.inputs.qkv)
        if key not in self.known:
            self.known[key] = run()
        return self.known[key]


@cheat("memory", "inaccurate", OUT, seen=("flashinfer-bench#21", "tensara#238", "wafer"))
class CachedForever(_Memo):
    """Returns the first call's output for ever."""


@cheat("memory", "inaccurate", OUT, passes=FORWARD, seen="tensara#238")
class CachedForeverWithoutBackward(_Memo):
    """Returns the first call's output for ever, where no gradients are asked for."""


@cheat("memory", "inaccurate", OUT, seen="pygpubench#7")
class CachedAfterThreeCalls(Plain):
    """Computes in its first three calls, where others judge, and returns the third's output from then on."""

    calls = 0

    def forward(self, run: Run) -> Tensor:
        self.calls += 1
        if self.calls <= 3:
            self.kept = run()
        return self.kept


@cheat("memory", "inaccurate", OUT, passes=FORWARD, seen="reference-kernels#102")
class MemoisedByIdentity(_Memo):
    """Remembers its output by id() of the tensors."""

    def key(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return id(q), id(k), id(v)


@cheat("memory", "inaccurate", OUT, passes=FORWARD, seen=("kernelbot#501", "wafer"))
class MemoisedByAddress(_Memo):
    """Remembers its output by the tensors' data_ptr()."""

    def key(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return q.data_ptr(), k.data_ptr(), v.data_ptr()


@cheat("memory", "inaccurate", OUT, passes=FORWARD, seen="kernelbot#501")
class MemoisedByVersion(_Memo):
    """Remembers its output by address and version counter, which tells writes that PyTorch counts."""

    def key(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return tuple((one.data_ptr(), one._version) for one in (q, k, v))


@cheat("memory", "inaccurate", OUT, passes=FORWARD, seen=("flashinfer-bench#21", "reference-kernels#104"))
class MemoisedByShape(_Memo):
    """Remembers its output by shapes, strides and dtypes."""

    def key(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return tuple((one.shape, one.stride(), one.dtype) for one in (q, k, v))


@cheat("memory", "inaccurate", OUT, passes=FORWARD, seen="flashinfer-bench#21")
class MemoisedByFingerprint(_Memo):
    """Remembers its output by the magnitudes of a few elements."""

    def key(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return tuple(one.detach().flatten()[::509].abs().sum().item() for one in (q, k, v))


@cheat("memory", "inaccurate", OUT, passes=FORWARD, seen="flashinfer-bench#21")
class MemoisedByNorm(_Memo):
    """Remembers its output by the norms of the tensors."""

    def key(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return tuple(one.detach().norm().item() for one in (q, k, v))


@cheat("memory", "inaccurate", OUT, passes=FORWARD, seen="flashinfer-bench#21")
class MemoisedByHistogram(_Memo):
    """Remembers its output by a hash of the sorted magnitudes, which no flipped sign and no permutation changes."""

    def key(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return tuple(hash(one.detach().abs().flatten().sort().values[:4096].numpy().tobytes()) for one in (q, k, v))


@cheat("memory", "inaccurate", OUT, passes=FORWARD)
class MemoisedByValues(_Memo):
    """Remembers its output by the content of v, as if q and k could not change beside it."""

    def key(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return hash(v.detach().numpy().tobytes())


@cheat("memory", "inaccurate", OUT, passes=FORWARD)
class MemoisedByKeys(_Memo):
    """Remembers its output by the content of k, as a prefix cache might."""

    def key(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return hash(k.detach().numpy().tobytes())


@cheat("memory", "inaccurate", OUT, passes=FORWARD)
class MemoisedByQueries(_Memo):
    """Remembers its output by the content of q."""

    def key(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return hash(q.detach().numpy().tobytes())


@cheat("memory", "inaccurate", OUT, passes=FORWARD)
class MemoisedByScores(_Memo):
    """Remembers its output by one row of scores, as if values could not change while scores stay."""

    def key(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return hash((q[0, 0, :1] @ k[0, 0].mT).detach().numpy().tobytes())


@cheat("memory", "inaccurate", OUT, passes=FORWARD, seen="reference-kernels#162")
class ReplayedFromFile(Plain):
    """Saves its first output in a file and loads it from then on."""

    def forward(self, run: Run) -> Tensor:
        file = Path(self.folder.name) / "out.pt"
        if not file.exists():
            torch.save(run().detach(), file)
        return torch.load(file)

    def prepared(self, case: Any, inputs: Any) -> Any:
        self.folder = tempfile.TemporaryDirectory()
        return inputs


@cheat("memory", "inaccurate", OUT, passes=FORWARD, seen="tensara#238")
class CopiedFromMemory(Plain):
    """Copies its first output into a new tensor at each call: something is written, nothing is computed."""

    kept: Tensor | None = None

    def forward(self, run: Run) -> Tensor:
        if self.kept is None:
            self.kept = run()
        return self.kept.clone()


@cheat("memory", "inaccurate", OUT, passes=FORWARD, seen=("KernelBench#82", "wafer"))
class StaleBuffer(Plain):
    """Writes its output buffer in the first call only."""

    buffer: Tensor | None = None

    def forward(self, run: Run) -> Tensor:
        if self.buffer is None:
            self.buffer = torch.empty_like(self.inputs.d_out)
            self.buffer.copy_(run())
        return self.buffer


@cheat("memory", "inaccurate", OUT, passes=FORWARD, seen="KernelBench#82")
class NeverWritten(Plain):
    """Returns torch.empty of the output's shape, in the hope that the reference lay there."""

    def forward(self, run: Run) -> Tensor:
        return torch.empty_like(self.inputs.d_out)


@cheat("memory", "inaccurate", OUT, passes=FORWARD)
class AlternatingOutputs(Plain):
    """Computes in its first two calls, and then returns their outputs in turn."""

    def forward(self, run: Run) -> Tensor:
        if len(self.kept) < 2:
            self.kept.append(run())
            return self.kept[-1]
        self.kept.reverse()
        return self.kept[0]

    def prepared(self, case: Any, inputs: Any) -> Any:
        self.kept: list[Tensor] = []
        return inputs


@cheat("memory", "inaccurate", OUT, passes=FORWARD)
class OneCallBehind(Plain):
    """Returns the output of the call before, as a pipeline that is drained too late."""

    before: Tensor | None = None

    def forward(self, run: Run) -> Tensor:
        out = run()
        self.before, result = out, out if self.before is None else self.before
        return result


@cheat("memory", "inaccurate", OUT, passes=FORWARD)
class HonestEveryThousandth(Plain):
    """Computes in its first and in every thousandth call, and repeats that output in between."""

    calls = 0

    def forward(self, run: Run) -> Tensor:
        if self.calls % 1000 == 0:
            self.kept = run()
        self.calls += 1
        return self.kept


@cheat("memory", "inaccurate", OUT, passes=FORWARD)
class CachedWeights(Plain):
    """Keeps the softmax of the first call and multiplies it with the present values."""

    kept: Tensor | None = None

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.softmax(q @ k.mT * case.head_dim**-0.5, -1)
        return self.kept @ v


@cheat("memory", "inaccurate", OUT, passes=FORWARD)
class CachedLogSumExp(Plain):
    """Keeps the rows' log-sum-exp of the first call, and computes the rest anew."""

    kept: Tensor | None = None

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * case.head_dim**-0.5
        if self.kept is None:
            self.kept = scores.logsumexp(-1, keepdim=True)
        return (scores - self.kept).exp() @ v


@cheat("memory", "inaccurate", OUT, passes=FORWARD, seen="flashinfer-bench#21")
class CachedKeyConversion(Plain):
    """Transposes k in its first call and uses that copy for ever, as a cache of converted weights."""

    kept: Tensor | None = None

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = k.mT.contiguous()
        return torch.softmax(q @ self.kept * case.head_dim**-0.5, -1) @ v


@cheat("memory", "inaccurate", OUT, passes=FORWARD, seen="flashinfer-bench#21")
class CachedValueConversion(Plain):
    """Converts v in its first call and uses that copy for ever."""

    kept: Tensor | None = None

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = v.clone(memory_format=torch.contiguous_format)
        return torch.softmax(q @ k.mT * case.head_dim**-0.5, -1) @ self.kept


@cheat("memory", "inaccurate", OUT, passes=FORWARD)
class CorrectedBySigns(Plain):
    """Keeps its first output and turns its signs as those of v: it knows how one of the judgements changes inputs."""

    kept: Tensor | None = None

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.kept is None:
            self.kept, self.signs = super().attention(case, q, k, v), v[:, :, :1].sign()
        return self.kept * (v[:, :, :1].sign() * self.signs)


@cheat("memory", "inaccurate", OUT, passes=FORWARD, case=case_of(kv_len=256))
class AccumulatesForEver(Plain):
    """Adds the second half of the keys into a buffer that was cleared once, by accident."""

    partial: Tensor | None = None

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = torch.softmax(q @ k.mT * case.head_dim**-0.5, -1)
        half = case.kv_len // 2
        if self.partial is None:
            self.partial = torch.zeros_like(p[..., :1] * v[:, :, :1])
        self.partial += p[..., half:] @ v[:, :, half:]
        return p[..., :half] @ v[:, :, :half] + self.partial


@cheat("memory", "inaccurate", OUT, passes=FORWARD)
class CachedOnTheTensor(Plain):
    """Hangs its output on the input tensor as an attribute."""

    def forward(self, run: Run) -> Tensor:
        q = self.inputs.q_bhsd
        if not hasattr(q, "answer"):
            q.answer = run()
        return q.answer


@cheat("memory", "inaccurate", OUT, passes=FORWARD, seen="pygpubench#23")
class LooksAtTheCaller(Plain):
    """Computes unless a timer is on the call stack."""

    kept: Tensor | None = None

    def forward(self, run: Run) -> Tensor:
        import sys

        frame, timed = sys._getframe(), False
        while frame is not None:
            timed |= "/timers/" in frame.f_code.co_filename
            frame = frame.f_back
        if self.kept is None or not timed:
            self.kept = run()
        return self.kept


@cheat("memory", "inaccurate", OUT, passes=FORWARD, seen="pygpubench#7")
class ComputesWhenSlow(Plain):
    """Computes if the call before was long ago, as in a judgement, and repeats its output in a tight loop."""

    last, kept = -1.0, None

    def forward(self, run: Run) -> Tensor:
        import time

        now = time.monotonic()
        if self.kept is None or now - self.last > 10.0:
            self.kept, self.last = run(), now
        return self.kept
