"""What is drawn for inputs with something rare among them: places that nobody can foresee."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import SystemRandom

import torch

from attn_exp.attention.formula import seen_keys
from attn_exp.attention.inputs import Inputs
from attn_exp.attention.rare import Rare
from attn_exp.core.case import Case

# A query sees several keys if it sees more than so many.
_SEVERAL = 8
# The powers of two by which rows of d_out are larger: that of the first judged query, which must hide nothing in dk and
# dv, and those of the others in turn. Nothing of them is left in fp16, and of every other one nothing where the largest
# is scaled into its range. A mean over millions of tokens has such gradients.
_FIRST = {"bfloat16": -70, "float32": -70, "float16": -8}
_OTHERS = {"bfloat16": (-30, -50), "float32": (-30, -50), "float16": (4,)}
# What dq of the first one may be off by: its scores are large, or the slope of a softcap is that of a rounded tanh.
_OF_FIRST = {"bfloat16": 0.75, "float16": 0.5, "float32": 1e-2}
# What the other gradients may be off by, which are those of small weights.
_OF_OTHERS = {"bfloat16": 0.25, "float16": 0.2, "float32": 1e-3}


@dataclass(frozen=True)
class Draw:
    """A case's normal inputs, and draws of places in them.

    Attributes:
        case: the problem.
        normal: its inputs, which stay as they are.
        dice: seeded by the system.
        first: the first key that each query sees, (q_len,).
        last: the last one, which precedes the first if a query sees none.
    """

    case: Case
    normal: Inputs
    dice: SystemRandom
    first: torch.Tensor
    last: torch.Tensor

    @classmethod
    def of(cls, case: Case, normal: Inputs) -> "Draw":
        """Return draws for a case."""
        return cls(case, normal, SystemRandom(), *seen_keys(case, torch.arange(case.q_len)))

    @property
    def several(self) -> torch.Tensor:
        """Whether each query sees several keys."""
        return self.last - self.first >= _SEVERAL

    def queries(self, *wanted: torch.Tensor) -> torch.Tensor:
        """Return the queries that see a key and are wanted.

        Args:
            wanted: of each query whether it is; what no query that is left fulfils is not asked for.
        """
        some = (self.last >= self.first).nonzero().squeeze(1)
        for one in wanted:
            some = some[one[some]] if one[some].any() else some
        return some

    def one(self, some: torch.Tensor) -> int:
        """Return one of several numbers."""
        return int(some[self.dice.randrange(len(some))])

    def many(self, some: torch.Tensor, count: int) -> list[int]:
        """Return different ones of several numbers, at most `count`."""
        chosen: list[int] = some[self.dice.sample(range(len(some)), min(count, len(some)))].tolist()
        return chosen

    def place(self) -> tuple[int, int, int]:
        """Return a row of the batch, a query head of it and its key-value head."""
        head = self.dice.randrange(self.case.q_heads)
        return self.dice.randrange(self.case.batch), head, head // (self.case.q_heads // self.case.kv_heads)

    def key(self, lowest: int, highest: int, besides: Sequence[int]) -> int | None:
        """Return one of the keys from `lowest` to `highest` that is none of some others, None if all are."""
        count = max(0, highest - lowest + 1)
        tried = self.dice.sample(range(lowest, lowest + count), min(count, len(besides) + 1))
        return next((one for one in tried if one not in besides), None)

    def with_backward(self, rare: Rare, first: torch.Tensor | None = None) -> Rare:
        """Return inputs whose backward is judged, too: d_out of the judged heads is tiny rows of the judged queries.

        In the heads that share their keys it is zeros else. Queries that see few keys have no row either, nor has one
        with nearly all of its weight on one key: their gradients cancel.

        Args:
            rare: inputs of a forward.
            first: the row of d_out of the first judged query, before it is made tiny; by default that of the inputs.
        """
        case, queries = self.case, rare.queries
        group, several = case.q_heads // case.kv_heads, self.several[queries]
        if rare.hard == "q" and case.softcap is None:
            several[0] = False
        if not several[1:].any():
            return rare
        first_head = rare.head // group * group
        powers = [_FIRST[case.dtype], *itertools.islice(itertools.cycle(_OTHERS[case.dtype]), len(queries) - 1)]
        d_out = rare.inputs.d_out_bhsd.detach().clone()
        factors = (torch.exp2(torch.tensor(powers, dtype=torch.float32)) * several).to(d_out.device)
        at = queries.to(d_out.device)
        rows = d_out[rare.batch, rare.head, at].float()
        if first is not None:
            rows[0] = first
        rows *= factors[:, None]
        d_out[rare.batch, first_head : first_head + group] = 0.0
        d_out[rare.batch, rare.head, at] = rows.to(d_out.dtype)
        slack = torch.full((len(queries),), _OF_OTHERS[case.dtype])
        slack[0] = _OF_FIRST[case.dtype]
        return replace(rare, inputs=replace(rare.inputs, d_out_bhsd=d_out), slack_of_dq=slack)
