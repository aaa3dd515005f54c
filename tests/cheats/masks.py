"""Masks, heads and boundaries that are another case's."""

from typing import Any

import torch

from cheats.corpus import FORWARD, case_of, cheat
from cheats.ways import Plain, Run, Tensor, attend, grouped, hidden, softmax

OUT = r"\bout\b"
CAUSAL = case_of(256, dtype="bfloat16", head_dim=64, value_dim=64, causal=True)
LONG = case_of(1024, batch=1, q_heads=2, kv_heads=2, dtype="bfloat16", head_dim=64, value_dim=64, causal=True)


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=case_of(q_len=64, causal=True))
class TopLeft(Plain):
    """Aligns the causal mask at the top left where the bottom right was asked for."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, mask=torch.ones(case.q_len, case.kv_len, dtype=torch.bool).triu(1))


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=case_of(q_len=64, causal=True, align="top_left"))
class BottomRight(Plain):
    """Aligns the causal mask at the bottom right where the top left was asked for."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shift = case.kv_len - case.q_len
        return attend(case, q, k, v, mask=torch.ones(case.q_len, case.kv_len, dtype=torch.bool).triu(1 + shift))


def _band(case: Any, left: int, right: int) -> Tensor:
    row, key = torch.arange(case.q_len)[:, None] + case.offset, torch.arange(case.kv_len)[None]
    return (key > row + right) | (key < row - left)


@cheat(
    "formula", "inaccurate", OUT, passes=FORWARD, case=case_of(512, batch=1, dtype="bfloat16", causal=True, window=200)
)
class WindowOneWider(Plain):
    """Lets a sliding window see one key more at its far end."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, mask=_band(case, case.window, 0))


@cheat(
    "formula", "inaccurate", OUT, passes=FORWARD, case=case_of(512, batch=1, dtype="bfloat16", causal=True, window=200)
)
class WindowOneNarrower(Plain):
    """Lets a sliding window see one key less at its far end."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, mask=_band(case, case.window - 2, 0))


@cheat(
    "formula", "inaccurate", OUT, passes=FORWARD, case=case_of(512, batch=1, dtype="bfloat16", causal=True, window=200)
)
class WindowSeesAhead(Plain):
    """Lets a sliding window see the key after the query's own."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, mask=_band(case, case.window - 1, 1))


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=CAUSAL)
class OwnKeyHidden(Plain):
    """Hides a query's own key."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(case.q_len, case.kv_len, dtype=torch.bool).triu(0)
        mask[0, 0] = False
        return attend(case, q, k, v, mask=mask)


class _TailUnmasked(Plain):
    rows = 0

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = hidden(case, q.device)
        mask[-self.rows :] = False
        return attend(case, q, k, v, mask=mask)


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=LONG)
class CausalIgnoredInLast4Rows(_TailUnmasked):
    """Ignores the causal mask in the last 4 rows."""

    rows = 4


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=LONG)
class CausalIgnoredInLast32Rows(_TailUnmasked):
    """Ignores the causal mask in the last 32 rows."""

    rows = 32


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=LONG)
class CausalByTile(Plain):
    """Masks whole tiles of 16 keys: a query also sees the rest of the tile of its own key."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        row, key = torch.arange(case.q_len)[:, None], torch.arange(case.kv_len)[None]
        return attend(case, q, k, v, mask=key // 16 > row // 16)


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=LONG)
class CausalByTileInOneHead(Plain):
    """Lets the rows at one tile's edge see 3 keys too many, in one head."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = hidden(case, q.device)
        wrong = mask.clone()
        for row in range(508, 512):
            wrong[row, : row + 4] = False
        return attend(case, q, k, v, mask=torch.stack([mask, wrong]))


def _padded(case: Any, tensor: Tensor, to: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, 0, 0, to - case.kv_len))


class _Padding(Plain):
    to = 0

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, _padded(case, k, self.to), _padded(case, v, self.to), mask=None)


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=case_of(q_len=64, kv_len=1016, dtype="bfloat16"))
class PaddingOf8Keys(_Padding):
    """Pads 1,016 keys with 8 zeros and does not mask them."""

    to = 1024


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=case_of(q_len=64, kv_len=2020, dtype="bfloat16"))
class PaddingOf28Keys(_Padding):
    """Pads 2,020 keys with 28 zeros and does not mask them."""

    to = 2048


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=case_of(kv_heads=2))
class WrongHeadMapping(Plain):
    """Gives query head i the key-value head i modulo their number, instead of those of its group."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = case.q_heads // case.kv_heads
        scores = q @ k.repeat(1, group, 1, 1).mT * case.head_dim**-0.5
        return softmax(scores) @ v.repeat(1, group, 1, 1)


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=case_of(kv_heads=2))
class ValuesOfAnotherHead(Plain):
    """Takes the keys of the right head and the values of the first one."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softmax(q @ grouped(case, k).mT * case.head_dim**-0.5) @ v[:, :1]


@cheat("formula", ("inaccurate", "error"), OUT + "|shape", passes=FORWARD)
class TransposedLayout(Plain):
    """Returns (batch, length, heads, dim) under the shape of (batch, heads, length, dim)."""

    def forward(self, run: Run) -> Tensor:
        out = run()
        return out.transpose(1, 2).contiguous().view(out.shape)


PACKED = case_of(256, batch=1, lengths=(100, 28, 128), causal=True)


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=PACKED)
class PackedAsOne(Plain):
    """Ignores the boundaries of packed sequences."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, mask=torch.ones(case.q_len, case.kv_len, dtype=torch.bool).triu(1))


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=PACKED)
class PackedOffByOne(Plain):
    """Counts the first token of each packed sequence to the one before."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lengths = torch.tensor(case.lengths)
        lengths[0] += 1
        lengths[-1] -= 1
        ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        mask = torch.ones(case.q_len, case.kv_len, dtype=torch.bool).triu(1)
        return attend(case, q, k, v, mask=mask | (ids[:, None] != ids[None]))


KEYLESS = case_of(q_len=160, causal=True)


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=KEYLESS)
class KeylessNan(Plain):
    """Returns NaN for queries that see no key."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, weights=lambda s: torch.softmax(s, -1))


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=KEYLESS)
class KeylessMean(Plain):
    """Returns the mean of all values for queries that see no key."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, fill=-1e30)


@cheat("formula", "inaccurate", OUT, passes=FORWARD, case=case_of(256))
class KeysOfZerosMasked(Plain):
    """Takes keys of zeros for padding and masks them."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        zeros = (k == 0).all(-1)[:, :, None]
        return attend(case, q, k, v, scores=lambda s: s.masked_fill(zeros, -torch.inf))
