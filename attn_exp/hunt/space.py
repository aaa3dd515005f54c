"""Draw examples with Hypothesis: shapes, masks, dtypes, layouts and values that a backend may compute.

Each choice has its simplest value first, and sizes begin at 1, so that Hypothesis shrinks towards small and plain
examples.
"""

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

from hypothesis import reject
from hypothesis import strategies as st

from attn_exp.attention.hard_values import KINDS
from attn_exp.backends.supports import DEVICES, Supports
from attn_exp.core.case import masks
from attn_exp.core.case.case import NORMAL, Case
from attn_exp.core.case.features import SWITCHES
from attn_exp.core.case.filter import Conjunct, Filter
from attn_exp.core.errors import UserError
from attn_exp.hunt.example import NO_BIAS, NUMBERS, OPTIONAL, WORDS, Example

# Kernels work in tiles of 64 to 256 tokens: lengths at their edges, with powers of two for tensors of other sizes.
_EDGES = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 2047)
_SOFTCAPS = (50.0, 30.0, 5.0, 1.0)
_PAGE_SIZES = (16, 1, 5, 64, 256)
_KINDS = (NORMAL, *(kind for kind in KINDS if kind != "faint"))
_TRUTHS = ("causal", *SWITCHES, "backward", "packed", "large")
# Lengths are at most these, one of them for each example.
_SIZES = (9, 17, 33, 66, 130, 260, 520, 1100, 2100)
# Scores of an example: more take too long for a search of thousands.
_MOST_SCORES = {"cpu": 1 << 18, "cuda": 1 << 26}
# With some that are padded to another multiple of 32 or 16 (flash-attention#2896: dq of 72 and 104).
_DIMS = (8, 16, 24, 32, 40, 48, 64, 72, 80, 96, 104, 128, 160, 192, 256)
_MOST_DIM = 256
_MOST_SEQUENCES = 4
_LEAST_HARD_DIM = 16


class Space:
    """The values that examples may have, by `where=`.

    Fields that it compares with constants are drawn from the values that fit, so that few draws are wasted. The rest of
    the expression is checked after the draw. Raises UserError if the expression is invalid, names an unknown field, or
    leaves a field without a value.
    """

    def __init__(self, where: str | None) -> None:
        self._values = {**WORDS, "inputs": _KINDS, **dict.fromkeys(_TRUTHS, (False, True))}
        getters = {name: itemgetter(name) for name in (*NUMBERS, *self._values)}
        self._conjuncts: tuple[Conjunct, ...] = ()
        shown = ""
        if where:
            # A number's values are an example of its type.
            filter_ = Filter(
                where, getters, lambda name: self._values.get(name, (1,)), f"the fields are {', '.join(getters)}"
            )
            self._conjuncts, shown = filter_.conjuncts(), filter_.shown
        self._alone = {name: [part for part in self._conjuncts if part.names == {name}] for name in getters}
        for name in filter(self.restricts, getters):
            if not (self.among(name, self._values[name]) if name in self._values else self.numbers(name)):
                raise UserError(f"{shown} leaves no value of {name}: relax it")

    def restricts(self, name: str) -> bool:
        """Whether the expression compares this field only with constants."""
        return bool(self._alone[name])

    def among(self, name: str, candidates: Iterable[Any]) -> list[Any]:
        """Return those of the candidates that fit."""
        return [value for value in candidates if all(part.test({name: value}) for part in self._alone[name])]

    def numbers(self, name: str) -> list[Any]:
        """Return the values of a number that the expression restricts, ascending, None first."""
        constants = [value for part in self._alone[name] for value in part.constants if isinstance(value, float)]
        near = {value + step for value in constants for step in (-1, 0, 1)} | {2 * value for value in constants}
        if name == "softcap":
            candidates: list[Any] = sorted({*_SOFTCAPS, *constants})
        else:
            whole = {int(value) for value in near if value == int(value) and 0 < value < 1 << 25}
            candidates = sorted({*range(1, 41), *_EDGES, *whole})
        return self.among(name, [None, *candidates] if name in OPTIONAL else candidates)

    def fits(self, example: Example) -> bool:
        """Whether the expression holds for an example."""
        fields = example.fields
        return all(part.test(fields) for part in self._conjuncts)


class Examples:
    """Strategies of examples for a backend: small ones, and ones with offsets above 2^31 elements.

    Raises UserError if the backend supports nothing of what `where=` leaves.
    """

    def __init__(self, supports: Supports, space: Space, device: str) -> None:
        self.supports = supports
        self.space = space
        self.device = device
        if device not in supports.devices:
            raise UserError(f"it runs only on {DEVICES[supports.devices[0]]}: set device=, or see attn-exp backends")
        self.dtypes = [name for name in space.among("dtype", WORDS["dtype"]) if name in supports.dtypes]
        if not self.dtypes:
            raise UserError(f"it computes {', '.join(supports.dtypes)}: relax where=")

    def small(self) -> st.SearchStrategy[Example]:
        """Return the strategy of examples that take milliseconds."""
        return st.composite(self._small)()

    def spread(self) -> st.SearchStrategy[Example]:
        """Return the strategy of small examples with large steps in memory."""
        return st.composite(self._spread)()

    def _small(self, draw: st.DrawFn) -> Example:
        supports = self.supports
        dtype = self._pick(draw, "dtype", self.dtypes)
        passes = supports.passes_at(dtype)
        backward = self._truth(draw, "backward", "backward" in passes)
        packed = self._truth(draw, "packed", "packed" in supports.features)
        causal = self._truth(draw, "causal", True)
        batch = 1 if packed else self._number(draw, "batch", 3)
        q_heads, kv_heads = self._heads(draw)
        most = _MOST_SCORES[self.device] // (batch * q_heads)
        lengths = None
        if packed:
            lengths = tuple(self._packed(draw, int(most**0.5)))
            q_len = kv_len = sum(lengths)
        else:
            q_len, kv_len = self._lengths(draw, most)
        head_dim, value_dim = self._dims(draw)
        sink = self._truth(draw, "sink", "sink" in supports.features)
        alibi = self._truth(draw, "alibi", "alibi" in supports.features)
        latent = self._truth(draw, "latent", "latent" in supports.features and not backward)
        value_dim = min(head_dim, value_dim) if latent else value_dim
        sizes = supports.page_sizes or _PAGE_SIZES
        page_size = self._optional(draw, "page_size", sizes, "paged" in supports.features and not backward)
        bias = self._pick(
            draw, "bias", WORDS["bias"] if "bias" in supports.features and not packed else WORDS["bias"][:1]
        )
        # Each channel of hard values has a role, so that there have to be some.
        kinds = _KINDS if min(head_dim, value_dim) >= _LEAST_HARD_DIM else (NORMAL,)
        example = Example(
            case=self._case(
                batch=batch, q_heads=q_heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, head_dim=head_dim,
                value_dim=value_dim, dtype=dtype, causal=causal, lengths=lengths, sink=sink,
                softcap=self._optional(draw, "softcap", _SOFTCAPS, "softcap" in supports.features), alibi=alibi,
                bias=None if bias == NO_BIAS else bias, latent=latent, page_size=page_size,
                **self._mask(draw, causal, kv_len),
                align=self._pick(draw, "align", WORDS["align"]), layout=self._pick(draw, "layout", WORDS["layout"]),
            ),
            inputs=self._pick(draw, "inputs", kinds), backward=backward, seed=draw(st.integers(0, 1 << 16)),
        )  # fmt: skip
        if (backward and example.case.forward_only) or not self.space.fits(example):
            reject()
        return example

    def _spread(self, draw: st.DrawFn) -> Example:
        dtype = self._pick(draw, "dtype", self.dtypes)
        backward = self._truth(draw, "backward", "backward" in self.supports.passes_at(dtype))
        which = draw(st.sampled_from("kqv"))
        batch, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        length = draw(st.sampled_from((1, 2, 3, 17, 65, 130)))
        head_dim, value_dim = self._dims(draw)
        case = self._case(
            batch=batch, q_heads=heads, kv_heads=heads, q_len=length, kv_len=length, head_dim=head_dim,
            value_dim=value_dim, dtype=dtype, causal=self._truth(draw, "causal", True),
        )  # fmt: skip
        example = Example(case=case, backward=backward, seed=draw(st.integers(0, 1 << 16)), large=which)
        if batch == heads == length == 1 or not self.space.fits(example):
            reject()
        return example

    def _case(self, **values: Any) -> Case:
        try:
            case = Case(**values)
        except UserError:
            reject()
        if self.supports.refusal(case, self.device):
            # A case that the backend declares not to compute is not counted.
            reject()
        return case

    def _pick(self, draw: st.DrawFn, name: str, choices: Sequence[Any]) -> Any:
        fitting = self.space.among(name, choices)
        if not fitting:
            reject()
        return draw(st.sampled_from(fitting))

    def _truth(self, draw: st.DrawFn, name: str, possible: bool) -> bool:
        return bool(self._pick(draw, name, (False, True) if possible else (False,)))

    def _number(self, draw: st.DrawFn, name: str, most: int) -> int:
        """Draw a number from 1 to `most`, or of those that `where=` leaves, however large."""
        if self.space.restricts(name):
            return int(draw(st.sampled_from(self.space.numbers(name))))
        return draw(st.integers(1, max(1, most)))

    def _heads(self, draw: st.DrawFn) -> tuple[int, int]:
        space = self.space
        if space.restricts("q_heads"):
            q_heads = self._number(draw, "q_heads", 1)
            divisors = [kv for kv in range(q_heads, 0, -1) if q_heads % kv == 0]
            fitting = [kv for kv in divisors if kv in space.numbers("kv_heads")] if space.restricts("kv_heads") else []
            return q_heads, draw(st.sampled_from(fitting or divisors))
        kv_heads = self._number(draw, "kv_heads", 3)
        return kv_heads * (draw(st.integers(1, 4)) if self.supports.grouped else 1), kv_heads

    def _lengths(self, draw: st.DrawFn, most: int) -> tuple[int, int]:
        """Draw q_len and kv_len with at most this many scores."""
        size = min(draw(st.sampled_from(_SIZES)), most)
        if self.space.restricts("seq_len"):
            both = self._number(draw, "seq_len", size)
            return both, both
        kv_len = self._length(draw, "kv_len", size)
        if draw(st.booleans()) and not self.space.restricts("q_len"):
            return min(kv_len, max(1, most // kv_len)), kv_len
        return self._length(draw, "q_len", max(1, min(size, most // kv_len))), kv_len

    def _length(self, draw: st.DrawFn, name: str, most: int) -> int:
        length = self._number(draw, name, most)
        if self.space.restricts(name) or not draw(st.booleans()):
            return length
        # The nearest edge of a tile, so that a shrunk length shrinks through the edges.
        return max((edge for edge in _EDGES if edge <= length), default=1)

    def _packed(self, draw: st.DrawFn, most: int) -> list[int]:
        size = max(1, min(draw(st.sampled_from(_SIZES)), most) // 2)
        count = draw(st.integers(1, _MOST_SEQUENCES))
        return [self._length(draw, "q_len", size) for _ in range(count)]

    def _dims(self, draw: st.DrawFn) -> tuple[int, int]:
        supports, space = self.supports, self.space
        largest, step = supports.largest_head_dim or _MOST_DIM, supports.head_dim_multiple
        dims = supports.head_dims or sorted({*range(step, 41, step), *(dim for dim in _DIMS if dim % step == 0)})
        dims = [dim for dim in dims if dim <= largest] or list(dims)[-1:]
        # A dimension of the user's own may be none of these.
        head_dim = self._number(draw, "head_dim", 1) if space.restricts("head_dim") else draw(st.sampled_from(dims))
        if space.restricts("value_dim"):
            return head_dim, self._number(draw, "value_dim", 1)
        if supports.value_dims == "equal" or not draw(st.booleans()):
            return head_dim, head_dim
        if supports.value_dims == "any":
            return head_dim, draw(st.sampled_from(dims))
        pairs = [pair for pair in supports.value_dims if not space.restricts("head_dim") or pair[0] == head_dim]
        return draw(st.sampled_from(pairs)) if pairs else (head_dim, head_dim)

    def _mask(self, draw: st.DrawFn, causal: bool, kv_len: int) -> dict[str, int | None]:
        """Return what changes a causal mask, by its name; most often nothing."""
        restricted = [name for name in masks.KINDS if self.space.restricts(name)]
        if restricted:
            return {name: draw(st.sampled_from(self.space.numbers(name))) for name in restricted}
        kinds = [name for name in self.supports.masks if causal]
        if not kinds or not draw(st.booleans()):
            return {}
        return {draw(st.sampled_from(kinds)): draw(st.integers(1, kv_len + 1))}

    def _optional(self, draw: st.DrawFn, name: str, choices: Sequence[Any], possible: bool) -> Any:
        """Draw a number that a case may be without."""
        if self.space.restricts(name):
            return draw(st.sampled_from(self.space.numbers(name)))
        return draw(st.sampled_from([None, *choices])) if possible else None
