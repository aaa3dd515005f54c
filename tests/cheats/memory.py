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


@cheat("memory", "inaccurate", r"it does not change with its inputs", passes=FORWARD, seen="flashinfer-bench#21")
class MemoisedByFingerprint(_Memo):
    """Remembers its output by the magnitudes of a few elements."""

    def key(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return tuple(one.detach().flatten()[::509].abs().sum().item() for one in (q, k, v))
