"""What a hunt asks, tries and finds: the messages between `attn-exp hunt` and its search, and what `where=` restricts.

A search draws examples. Those fields of an example that `where=` compares with constants are drawn from the values that
fit, so that few draws are wasted; the rest of the expression is checked after the draw.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from attn_exp.core.case import BIASES, CAUSAL_MASKS, DTYPES, LAYOUTS, TYPED_DTYPES, Case
from attn_exp.core.errors import UserError
from attn_exp.core.filter import Conjunct, Filter

# Kernels work in tiles of 64 to 256 tokens: lengths at their edges, with powers of two for tensors of other sizes.
EDGES = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 2047)
SOFTCAPS = (50.0, 30.0, 5.0, 1.0)
# The word for a case without a bias.
NO_BIAS = "none"
# Simple ones first: a search shrinks towards them.
WORDS: dict[str, tuple[str, ...]] = {
    "dtype": ("float32", "bfloat16", "float16", DTYPES["fp8"], DTYPES["int8"]),
    "align": ("top_left", "bottom_right"),
    "layout": LAYOUTS,
    "bias": (NO_BIAS, *BIASES),
}
# Kinds of values: those of attn_exp/attention/hard_values.py after the normal ones.
KINDS = (
    *("normal", "sharp", "negative", "positive", "abyss", "needles", "sinks", "ramps", "outliers", "constant", "zeros"),
    *("large", "denormal", "mixed"),
)
TRUTHS = ("causal", "sink", "alibi", "backward", "packed", "large")
_SIZES = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "seq_len", "head_dim", "value_dim")
# Numbers that a case may be without.
_OPTIONAL = (*CAUSAL_MASKS, "softcap")
NUMBERS = (*_SIZES, *_OPTIONAL)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to search: a backend with its options, on `cpu` or `cuda`, for `budget_s` seconds."""

    backend: dict[str, Any]
    device: str
    where: str | None
    budget_s: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class Example:
    """One thing to try.

    Attributes:
        case: the problem.
        inputs: the kind of the values.
        backward: whether gradients are computed too.
        seed: of the values.
        large: `q`, `k` or `v` if the elements of this tensor lie so far from each other that offsets pass 2^31;
            `whole` if it has that many elements, of which some heads are judged and the others are zeros.
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
        names = (*NUMBERS, *WORDS, "causal", "sink", "alibi")
        own = {name: getattr(case, name) for name in names if hasattr(case, name)} | {"bias": case.bias or NO_BIAS}
        return own | {
            "seq_len": max(case.q_len, case.kv_len), "inputs": self.inputs, "backward": self.backward,
            "packed": case.lengths is not None, "large": self.large is not None,
        }  # fmt: skip

    @property
    def weight(self) -> tuple[Any, ...]:
        """Return a key that sorts simple examples first."""
        case = self.case
        large = 2 if self.large == "whole" else int(self.large is not None)
        features = (
            case.lengths is not None,
            case.causal,
            case.sink,
            case.alibi,
            case.bias is not None,
            *(getattr(case, name) is not None for name in _OPTIONAL),
        )
        words = (WORDS["dtype"].index(case.dtype), WORDS["layout"].index(case.layout), KINDS.index(self.inputs))
        sizes = (case.batch * case.q_heads, max(case.q_len, case.kv_len), case.q_len + case.kv_len, case.head_dim)
        return (large, sum(features) + self.backward, sum(words), *sizes, case.value_dim, self.seed)

    def label(self) -> str:
        """Return a short label."""
        more = [self.inputs] * (self.inputs != "normal") + ["with backward"] * self.backward
        if self.large is not None and self.large != "whole":
            more.append(f"offsets of {self.large} above 2^31")
        return " ".join([self.case.label(), *more])


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of an example.

    Attributes:
        status: that of a job, and its reason.
        tensor: the wrong tensor, or `edge` for an output that is wrong at the boundary of the mask.
        error: which of its errors is too large, a field of `TensorError`.
        off: how large it is; None if the tensor is not finite.
        allowed: the tolerance.
        least_norm: rows of a smaller norm, relative to a typical row's, are judged as if they had this one.
        vanishing: the root mean square below which the right values are noise, and what errors are then relative to.
        place: row of the batch and key-value head of the part that was judged; None if everything was.
        poisoned: whether the process can no longer use the device.
    """

    status: str
    reason: str | None = None
    tensor: str | None = None
    error: str = "relative"
    off: float | None = None
    allowed: float | None = None
    least_norm: float = 1.0
    vanishing: tuple[float, float] = (0.0, 1.0)
    place: tuple[int, int] | None = None
    poisoned: bool = False


@dataclass(frozen=True, kw_only=True)
class Script:
    """A program that shows a bug, or what has to be filled in (`why_not`) before it does."""

    text: str
    why_not: str = ""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Try an example; with the `outcome` of an earlier try, write its script."""

    example: Example
    outcome: Outcome | None = None


@dataclass(frozen=True, kw_only=True)
class Find:
    """A bug: the smallest example that shows it, what it does, and when the first one was found.

    `shown` says whether its script was run and showed it; None if it was not run.
    """

    example: Example
    outcome: Outcome
    after_s: float
    script: Script | None = None
    shown: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Search:
    """The state of a search, as it is shown while it goes on and at its end.

    Attributes:
        tried: examples that ran and were judged.
        large: those of them with a tensor of more than 2^31 elements.
        refused: examples that the backend cannot compute; `why` is the last reason.
        too_large: examples for which the memory was too small.
        spent_s: seconds since the search began, without the start of its process.
        now: the example that runs, in words.
        find: the bug.
        over: whether the search has ended.
        notes: sentences about what was not searched.
        mistake: why there was no search.
    """

    tried: int = 0
    large: int = 0
    refused: int = 0
    why: str = ""
    too_large: int = 0
    spent_s: float = 0.0
    now: str = ""
    find: Find | None = None
    over: bool = False
    notes: tuple[str, ...] = ()
    mistake: str | None = None


class Space:
    """The values that examples may have, by `where=`.

    Raises:
        UserError: the expression is invalid, names an unknown field, or leaves a field without a value.
    """

    def __init__(self, where: str | None) -> None:
        self._words = WORDS | {"inputs": KINDS}
        self._conjuncts: tuple[Conjunct, ...] = ()
        self._shown = ""
        if where:
            known = {name: itemgetter(name) for name in (*NUMBERS, *self._words, *TRUTHS)}
            filter_ = Filter(where, known, self._values, f"the fields are {', '.join(known)}")
            self._conjuncts, self._shown = filter_.conjuncts(), filter_.shown
        self._alone = {
            name: [one for one in self._conjuncts if one.names == {name}] for name in (*NUMBERS, *self._words, *TRUTHS)
        }
        for name, words in self._words.items():
            self.among(name, words)
        for name in TRUTHS:
            self.among(name, (False, True))
        for name in NUMBERS:
            if self.restricts(name):
                self.numbers(name)

    def _values(self, name: str) -> tuple[Any, ...]:
        """Return all words of a field, or values of a number's or a truth's type."""
        return self._words.get(name) or ((False, True) if name in TRUTHS else (1,))

    def restricts(self, name: str) -> bool:
        """Whether the expression compares this field only with constants."""
        return bool(self._alone[name])

    def among(self, name: str, candidates: Iterable[Any]) -> list[Any]:
        """Return those of the candidates that fit. Raises UserError if there are some and none of them fits."""
        given = list(candidates)
        kept = [value for value in given if all(one.test({name: value}) for one in self._alone[name])]
        if given and not kept:
            raise UserError(f"{self._shown} leaves no value of {name}: relax it")
        return kept

    def numbers(self, name: str) -> list[Any]:
        """Return the values of a number that the expression restricts, ascending, None first."""
        constants = [value for one in self._alone[name] for value in one.constants if isinstance(value, float)]
        near = {value + step for value in constants for step in (-1, 0, 1)} | {2 * value for value in constants}
        if name == "softcap":
            candidates: list[Any] = sorted({*SOFTCAPS, *constants})
        else:
            whole = {int(value) for value in near if value == int(value) and 0 < value < 1 << 25}
            candidates = sorted({*range(1, 41), *EDGES, *whole})
        return self.among(name, [None, *candidates] if name in _OPTIONAL else candidates)

    def fits(self, example: Example) -> bool:
        """Whether the expression holds for an example."""
        fields = example.fields
        return all(one.test(fields) for one in self._conjuncts)


def overrides(example: Example, device: str) -> list[str]:
    """Return an example as overrides of `attn-exp run`, without its backend."""
    case = example.case
    words = [f"batch={case.batch}", f"q_len={case.q_len}", f"kv_len={case.kv_len}"]
    if case.lengths is not None:
        words = [f"lengths=[{','.join(map(str, case.lengths))}]"]
    elif case.square:
        words[1:] = [f"seq_len={case.q_len}"]
    words += [f"model.q_heads={case.q_heads}", f"model.kv_heads={case.kv_heads}", f"model.head_dim={case.head_dim}"]
    words += [f"model.value_dim={case.value_dim}"] if case.value_dim != case.head_dim else []
    words += [f"dtype={TYPED_DTYPES[case.dtype]}", f"causal={str(case.causal).lower()}"]
    words += [f"align={case.align}"] if case.causal and not case.square else []
    masks = {name: getattr(case, name) for name in CAUSAL_MASKS}
    words += [f"{name}={keys}" for name, keys in masks.items() if keys is not None]
    words += [f"softcap={case.softcap:g}"] if case.softcap is not None else []
    words += [f"{name}=true" for name in ("sink", "alibi") if getattr(case, name)]
    words += [f"bias={case.bias}"] if case.bias is not None else []
    words += [f"layout={case.layout}"] if case.layout != LAYOUTS[0] else []
    words += [f"inputs={example.inputs}"] if example.inputs != "normal" else []
    words += [] if example.backward else ["passes=[forward]"]
    return [*words, f"seed={example.seed}", f"device={device}"]
