"""Messages between `attn-exp hunt` and its search: the question, an example and its outcome, the search's state."""

from dataclasses import dataclass
from typing import Any

from attn_exp.core.case.case import DTYPES, LAYOUTS, Case
from attn_exp.core.case.features import BIASES, SWITCHES
from attn_exp.core.case.masks import KINDS

# The word for a case without a bias.
NO_BIAS = "none"
# Simple ones first: a search shrinks towards them.
WORDS: dict[str, tuple[str, ...]] = {
    "dtype": ("float32", "bfloat16", "float16", DTYPES["fp8"], DTYPES["int8"]),
    "align": ("top_left", "bottom_right"),
    "layout": LAYOUTS,
    "bias": (NO_BIAS, *BIASES),
}
# Numbers that a case may be without.
OPTIONAL = (*KINDS, "softcap", "page_size")
NUMBERS = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "seq_len", "head_dim", "value_dim", *OPTIONAL)


@dataclass(frozen=True, kw_only=True)
class Question:
    """The subject of a search: a backend with its options, on `cpu` or `cuda`, for `budget_s` seconds."""

    backend: dict[str, Any]
    device: str
    where: str | None
    budget_s: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class Example:
    """One thing to try.

    `large` is `q`, `k` or `v` if the elements of this tensor lie so far from each other that offsets pass 2^31.
    """

    case: Case
    inputs: str = "normal"
    backward: bool = False
    seed: int = 0
    large: str | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """Return the values that `where=` compares."""
        case = self.case
        names = (*NUMBERS, *WORDS, "causal", *SWITCHES)
        own = {name: getattr(case, name) for name in names if hasattr(case, name)} | {"bias": case.bias or NO_BIAS}
        return own | {
            "seq_len": max(case.q_len, case.kv_len), "inputs": self.inputs, "backward": self.backward,
            "packed": case.lengths is not None, "large": self.large is not None,
        }  # fmt: skip

    def label(self) -> str:
        """Return a short label."""
        more = [self.inputs] * (self.inputs != "normal") + ["with backward"] * self.backward
        if self.large is not None:
            more.append(f"offsets of {self.large} above 2^31")
        return " ".join([self.case.label(), *more])


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of trying an example: one of a job's statuses, and whether the process lost the device by it."""

    status: str
    reason: str | None = None
    poisoned: bool = False


@dataclass(frozen=True, kw_only=True)
class Search:
    """The state of a search, as it is shown while it goes on and at its end.

    `tried` counts examples that ran and were judged, `large` those of them with offsets above 2^31, `refused` those
    that the backend cannot compute (`why` is the last reason), and `too_large` those that did not fit into the memory.
    `example` is the smallest one that shows a bug, `outcome` what it does, and `mistake` why there was no search.
    """

    tried: int = 0
    large: int = 0
    refused: int = 0
    why: str = ""
    too_large: int = 0
    spent_s: float = 0.0
    now: str = ""
    example: Example | None = None
    outcome: Outcome | None = None
    after_s: float = 0.0
    over: bool = False
    mistake: str | None = None
