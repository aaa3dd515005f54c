"""Outputs and intermediates that are kept from an earlier call in other ways than by a key."""

import tempfile
from pathlib import Path
from typing import Any

import torch

from cheats.corpus import FORWARD, case_of, cheat
from cheats.ways import Plain, Run, Tensor

OUT = r"\bout\b|result of the first call"


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
