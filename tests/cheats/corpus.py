"""What an entry of the corpus is: a backend, what it is run on, and what its record must say."""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attn_exp.core.case.case import Case
from attn_exp.core.record.request import Compile

# Public reports of cheats and of their causes, by the name under which an entry cites them.
REPORTS = {
    "flashinfer-bench#21": "https://github.com/flashinfer-ai/flashinfer-bench-starter-kit/issues/21",
    "tensara#238": "https://github.com/tensara/tensara/pull/238",
    "reference-kernels#102": "https://github.com/gpu-mode/reference-kernels/pull/102",
    "reference-kernels#104": "https://github.com/gpu-mode/reference-kernels/pull/104",
    "reference-kernels#162": "https://github.com/gpu-mode/reference-kernels/issues/162",
    "kernelbot#501": "https://github.com/gpu-mode/kernelbot/pull/501",
    "pygpubench#7": "https://github.com/gpu-mode/pygpubench/pull/7",
    "pygpubench#23": "https://github.com/gpu-mode/pygpubench/issues/23",
    "KernelBench#82": "https://github.com/ScalingIntelligence/KernelBench/pull/82",
    "KernelBench#165": "https://github.com/ScalingIntelligence/KernelBench/issues/165",
    "flash-attention#1745": "https://github.com/Dao-AILab/flash-attention/issues/1745",
    "flashinfer#3716": "https://github.com/flashinfer-ai/flashinfer/issues/3716",
    "LLMs-from-scratch#1061": "https://github.com/rasbt/LLMs-from-scratch/issues/1061",
    "wafer": "https://www.wafer.ai/blog/reward-hacks-field-guide",
    "wafer-104x": "https://www.wafer.ai/blog/reward-hacking",
}

# Small, so that a job takes a tenth of a second; head dimensions that the check of mask boundaries can judge.
SMALL = Case(
    batch=2, q_heads=4, kv_heads=4, q_len=128, kv_len=128, head_dim=32, value_dim=32, dtype="float32", causal=False
)  # fmt: skip
BOTH = ("forward", "backward")
FORWARD = ("forward",)


def case_of(tokens: int | None = None, **changes: Any) -> Case:
    """`SMALL` with these fields; `tokens` sets queries and keys."""
    lengths = {} if tokens is None else {"q_len": tokens, "kv_len": tokens}
    return replace(SMALL, **{**lengths, **changes})


@dataclass(frozen=True)
class Entry:
    """One backend of the corpus.

    Attributes:
        group: its class: memory, parts, formula, ...; `honest` for those that must stay `ok`.
        target: the backend's class as `_target_`.
        about: one sentence: what it does.
        statuses: the statuses that it may get.
        words: a regular expression that the reason must match; None for `ok`.
        case: what it is run on.
        passes: the passes that are measured.
        seen: the reports of such a cheat.
        options: options of the backend.
        compile: whether and how torch.compile compiles it.
        rival: whether it is measured in a duel, against an honest backend, which must stay `ok`.
        worker: whether it needs a worker process of its own, because it hangs or kills its process.
        ceiling_flops: the measured FLOP/s of a matrix product that the machine claims, None for more than any CPU has.
        device: `cpu` or `cuda`.
        timer: the timer that ranks, None for the device's usual one.
        determinism: whether the bits of its results are compared, too.
    """

    group: str
    target: str
    about: str
    statuses: tuple[str, ...]
    words: str | None
    case: Case = SMALL
    passes: tuple[str, ...] = BOTH
    seen: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    compile: Compile = field(default_factory=Compile)
    rival: bool = False
    worker: bool = False
    ceiling_flops: float | None = None
    device: str = "cpu"
    timer: str | None = None
    determinism: bool = False

    @property
    def name(self) -> str:
        """The class's name, with the options' values."""
        values = "".join(f"-{value}" for value in self.options.values())
        return self.target.rpartition(".")[2] + values + ("-rival" if self.rival else "")


ENTRIES: list[Entry] = []

Decorator = Callable[[type], type]


def cheat(group: str, status: str | tuple[str, ...], words: str, **more: Any) -> Decorator:
    """Register a backend that must not end `ok`, but with `status` and a reason that matches `words`."""
    statuses = (status,) if isinstance(status, str) else status
    assert "ok" not in statuses
    return lambda made: _registered(made, group, statuses, words, more)


def honest(**more: Any) -> Decorator:
    """Register a backend that does something unusual but right, and must end `ok`."""
    return lambda made: _registered(made, "honest", ("ok",), None, more)


def _registered(
    made: type, group: str, statuses: tuple[str, ...], words: str | None, more: dict[str, Any]
) -> type:  # fmt: skip
    seen = more.pop("seen", ())
    seen = (seen,) if isinstance(seen, str) else seen
    assert all(report in REPORTS for report in seen), seen
    about = (made.__doc__ or "").strip()
    assert about.endswith(".") and "\n" not in about, f"{made.__name__} needs a docstring of one line"
    target = f"{made.__module__}.{made.__qualname__}"
    ENTRIES.append(Entry(group, target, about, statuses, words, seen=seen, **more))
    return made


def load() -> list[Entry]:
    """Return all entries, module by module, whichever of them was imported first."""
    for module in pkgutil.walk_packages([str(Path(__file__).parent)], "cheats."):
        if module.name.rpartition(".")[2] not in ("page", "check", "__main__"):
            importlib.import_module(module.name)
    names = [entry.name for entry in ENTRIES]
    assert len(names) == len(set(names)), [name for name in names if names.count(name) > 1]
    # Of one module they keep their order: sorting is stable.
    return sorted(ENTRIES, key=lambda entry: entry.target.rpartition(":" if ":" in entry.target else ".")[0])
