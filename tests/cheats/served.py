"""What a server's memory shows: slots that hold no key, last pages that are not full, and memory behind tokens."""

from typing import Any

import torch

from attn_exp.attention.inputs import paged
from attn_exp.backends.base import Calls, calls_of
from cheats.corpus import FORWARD, case_of, cheat, honest
from cheats.ways import Plain, Tensor, grouped

FULL = case_of(1, kv_len=64, page_size=16, layout="bshd")
PARTIAL = case_of(1, kv_len=60, page_size=16, layout="bshd", causal=True)
PACKED = case_of(60, batch=1, lengths=(40, 20), layout="bshd", causal=True)


class _WholePages(Plain):
    """Gathers whole pages, and adds minus infinity to the scores of what lies behind the last key."""

    # Whether the slots of the last page that have no key count.
    counts_tail = False

    def prepare(self, case: Any, inputs: Any) -> Calls:
        read = paged(case, inputs)
        pages, size = read.paging.pages, read.paging.pages.page_size
        lengths = torch.tensor(pages.lengths)[:, None]
        ends = -(-lengths // size) * size if self.counts_tail else lengths
        behind = torch.arange(pages.table.shape[1] * size)[None] >= ends
        added = torch.zeros(behind.shape).masked_fill(behind, -torch.inf)[:, None, None]

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = (grouped(case, pool[pages.table.long()].flatten(1, 2).transpose(1, 2)) for pool in (k, v))
            return (q @ keys.mT * case.head_dim**-0.5 + added).softmax(-1) @ values

        return calls_of(attention, read)


@honest(case=PARTIAL, passes=FORWARD, seen="flash-attention#1745")
class ReadsWholePages(_WholePages):
    """Is right unless a slot without a key holds a NaN, which times a weight of zero is one."""


@cheat(
    "parts", "inaccurate", "with last pages that are not full", case=FULL, passes=FORWARD, seen="flashinfer#3716"
)  # fmt: skip
class CountsTheTailOfPages(_WholePages):
    """Counts what lies in the last page behind the last key, which shows only where that page is not full."""

    counts_tail = True


@honest(case=PACKED, passes=FORWARD, seen="flash-attention#1745")
class ReadsBehindPackedTokens(Plain):
    """Multiplies whole tiles of 64 tokens, and adds minus infinity to the scores of those behind the last one."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (one.as_strided((*one.shape[:2], 64, one.shape[3]), one.stride()) for one in (k, v))
        seen = torch.block_diag(*(torch.ones(length, length).tril() for length in case.lengths))
        hides = torch.nn.functional.pad(seen, (0, 64 - case.kv_len)).log()
        return (q @ keys.mT * case.head_dim**-0.5 + hides).softmax(-1) @ values
