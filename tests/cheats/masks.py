"""Masks, heads and boundaries that are another case's."""

from typing import Any

import torch

from cheats.corpus import FORWARD, case_of, cheat
from cheats.ways import Plain, Tensor, attend, hidden, softmax

OUT = r"\bout\b"
CAUSAL = case_of(256, dtype="bfloat16", head_dim=64, value_dim=64, causal=True)
LONG = case_of(1024, batch=1, q_heads=2, kv_heads=2, dtype="bfloat16", head_dim=64, value_dim=64, causal=True)


@cheat(
    "formula", "inaccurate", "out is attention with causal aligned top left", passes=FORWARD,
    case=case_of(q_len=64, causal=True)
)  # fmt: skip
class TopLeft(Plain):
    """Aligns the causal mask at the top left where the bottom right was asked for."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, mask=torch.ones(case.q_len, case.kv_len, dtype=torch.bool).triu(1))


def _band(case: Any, left: int, right: int) -> Tensor:
    row, key = torch.arange(case.q_len)[:, None] + case.offset, torch.arange(case.kv_len)[None]
    return (key > row + right) | (key < row - left)


@cheat(
    "formula", "inaccurate", "out is attention with window=201", passes=FORWARD,
    case=case_of(512, batch=1, dtype="bfloat16", causal=True, window=200),
)  # fmt: skip
class WindowOneWider(Plain):
    """Lets a sliding window see one key more at its far end."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, mask=_band(case, case.window, 0))


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


@cheat(
    "formula",
    "inaccurate",
    "out is attention in which query head i reads key-value head i % 2",
    passes=FORWARD,
    case=case_of(kv_heads=2),
)
class WrongHeadMapping(Plain):
    """Gives query head i the key-value head i modulo their number, instead of those of its group."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = case.q_heads // case.kv_heads
        scores = q @ k.repeat(1, group, 1, 1).mT * case.head_dim**-0.5
        return softmax(scores) @ v.repeat(1, group, 1, 1)


PACKED = case_of(256, batch=1, lengths=(100, 28, 128), causal=True)


@cheat("formula", "inaccurate", "out is attention over all packed sequences as one", passes=FORWARD, case=PACKED)
class PackedAsOne(Plain):
    """Ignores the boundaries of packed sequences."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, mask=torch.ones(case.q_len, case.kv_len, dtype=torch.bool).triu(1))


@cheat(
    "formula", "inaccurate", "out is attention with its mask inverted", passes=FORWARD, case=CAUSAL,
    seen="LLMs-from-scratch#1061",
)  # fmt: skip
class MaskInverted(Plain):
    """Hides what the mask shows; the first query of each head then reads itself."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = ~hidden(case, q.device)
        return attend(case, q, k, v, mask=mask & ~mask.all(-1, keepdim=True))


@cheat("formula", "inaccurate", "out is attention without its causal mask", passes=FORWARD, case=CAUSAL)
class MaskForgotten(Plain):
    """Shows all keys to every query."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, mask=None)


@cheat("formula", "inaccurate", "out is attention to the first 192 of 200 keys", passes=FORWARD, case=case_of(200))
class LastTileOfKeysLost(Plain):
    """Reads whole tiles of 64 keys only."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k[:, :, :192], v[:, :, :192], mask=None)
