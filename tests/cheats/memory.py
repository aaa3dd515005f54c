"""Outputs that were computed once and are returned again: right only as long as nothing changes."""

from typing import Any

from cheats.corpus import FORWARD, cheat
from cheats.ways import Plain, Run, Tensor

OUT = r"\bout\b|result of the first call"
KNOWN = r"\bout\b|with other signs: what is known"


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


@cheat("memory", ("inaccurate", "implausible"), KNOWN, passes=FORWARD, seen="flashinfer-bench#21")
class MemoisedByNorm(_Memo):
    """Remembers its output by the norms of the tensors."""

    def key(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return tuple(one.detach().norm().item() for one in (q, k, v))


@cheat("memory", ("inaccurate", "implausible"), KNOWN, passes=FORWARD, seen="flashinfer-bench#21")
class MemoisedByHistogram(_Memo):
    """Remembers its output by a hash of the sorted magnitudes, which no flipped sign and no permutation changes."""

    def key(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return tuple(hash(one.detach().abs().flatten().sort().values[:4096].numpy().tobytes()) for one in (q, k, v))


@cheat("memory", "inaccurate", OUT, passes=FORWARD)
class MemoisedByScores(_Memo):
    """Remembers its output by one row of scores, as if values could not change while scores stay."""

    def key(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return hash((q[0, 0, :1] @ k[0, 0].mT).detach().numpy().tobytes())
