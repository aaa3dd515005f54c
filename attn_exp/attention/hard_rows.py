"""Rows of q and keys of hard inputs: see attn_exp/attention/hard_values.py."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from attn_exp.attention.formula import seen_keys
from attn_exp.core.case.case import Case

# Standard deviation of sharp scores, or this share of the softcap if that is more: its tails pass the softcap.
_SHARP, _OF_SOFTCAP = 5.0, 0.6
# The score of a needle: other keys then score 60 at most, and exp of the difference overflows (beyond 88.7), so that
# each row needs its maximum over all keys. A needle's score above a row that is shifted as a whole. The score of a
# needle behind the mask, so that the visible scores stay small.
_NEEDLE, _SHIFTED_NEEDLE, _TRAP = 160.0, 64.0, 24.0
# A sink's score exceeds the logarithm of the number of keys by this much: it gets nine tenths of the weight.
_SINK = 2.5
_RAMP = 24.0
# Beyond -ln(FLT_MAX) = -88.7 (pytorch#196678), and as far as scores of Qwen2.5 reach (cudnn-frontend#743).
_DEPTHS = (100.0, 200.0, 400.0)
# |q kT| of 2.5e5 before its scale, below the -5e4 of flashinfer#4267; in fp16 the product must not overflow.
_ABYSS = 22_000.0
_LARGEST_PRODUCT_FP16 = 6e4
# One in so many keys of odd indices is zeros, in every other head, where a kind has such keys.
_ZEROS_EVERY = 8
# One in so many tokens has rows of zeros in d_out, where a kind has such tokens.
_SILENT_EVERY = 16


@dataclass(frozen=True)
class Role:
    """The channels of one role, as a mask (head_dim,) of ones and zeros, and how many they are."""

    mask: torch.Tensor
    count: int


@dataclass(frozen=True)
class Channels:
    """The roles of the channels of q and k.

    Attributes:
        offset: equal in all keys: shift all scores of a row.
        ramp: grow along the keys.
        sink: set only in the first key of a sequence.
        signs: random signs in every key.
        size: the magnitude of k in each channel, (head_dim,).
        large: the magnitude in channels of the first three roles.
    """

    offset: Role
    ramp: Role
    sink: Role
    signs: Role
    size: torch.Tensor
    large: float


@dataclass(frozen=True)
class Rows:
    """Query rows that get the same treatment, by their heads (counted over the rows of the batch) and queries.

    `k` are the keys of some rows of the batch, (batch * kv_heads, kv_len, head_dim) in float32.
    """

    case: Case
    channels: Channels
    k: torch.Tensor
    heads: torch.Tensor
    queries: torch.Tensor
    generator: torch.Generator

    def normal(self, deviation: float) -> torch.Tensor:
        """Return rows of q whose scores have this standard deviation."""
        signs, size = self.channels.signs, self.channels.size
        noise = torch.randn(len(self.queries), len(size), generator=self.generator, device=size.device)
        amount: float = deviation * (self.case.head_dim / signs.count) ** 0.5
        return noise * (signs.mask / size * amount)

    def aimed(self, key: torch.Tensor, score: float) -> torch.Tensor:
        """Return rows of q that score about `score` at a key and, equally, at its twin."""
        kv_head = self.heads // (self.case.q_heads // self.case.kv_heads)
        twin = torch.where((key ^ 1) < self.case.kv_len, key ^ 1, key)
        common = (self.k[kv_head, key].sign() + self.k[kv_head, twin].sign()) / 2
        signs = self.channels.signs
        amount: float = score * self.case.head_dim**0.5 / signs.count
        return common * (signs.mask / self.channels.size * amount)

    def shifted(self, role: Role, score: float | torch.Tensor) -> torch.Tensor:
        """Return rows of q that score `score` where the keys' channels of a role have their full magnitude."""
        # A head of one or two channels has none to spare.
        weight = role.count * self.channels.large * self.case.head_dim**-0.5 or 1.0
        by_row = score.unsqueeze(-1) / weight if isinstance(score, torch.Tensor) else score / weight
        return (role.mask * by_row).expand(len(self.queries), -1)

    def seen(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first and the last key that each row sees, any key for a row that sees none."""
        first, last = seen_keys(self.case, self.queries)
        most = self.case.kv_len - 1
        return first.clamp(0, most), torch.maximum(first, last).clamp(0, most)

    def visible(self) -> torch.Tensor:
        """Return one random visible key for each row."""
        first, last = self.seen()
        return torch.minimum(last, first + (self.uniform() * (last - first + 1)).long())

    def depths(self) -> torch.Tensor:
        """Return one of the depths for each row."""
        depths = torch.tensor(_DEPTHS, device=self.queries.device)
        return depths[(self.uniform() * len(_DEPTHS)).long().clamp(max=len(_DEPTHS) - 1)]

    def uniform(self) -> torch.Tensor:
        """Return a random number from 0 to 1 for each row."""
        return torch.rand(len(self.queries), generator=self.generator, device=self.queries.device)


# Maps rows to their q, (rows, head_dim) in float32.
Treatment = Callable[[Rows], torch.Tensor]


def normal(rows: Rows) -> torch.Tensor:
    """Make scores of N(0, 1)."""
    return rows.normal(1.0)


def sharp(rows: Rows) -> torch.Tensor:
    """Make scores of a standard deviation of at least 5, and beyond a softcap."""
    return rows.normal(max(_SHARP, _OF_SOFTCAP * (rows.case.softcap or 0.0)))


def needle(rows: Rows) -> torch.Tensor:
    """Aim at one visible key."""
    return rows.aimed(rows.visible(), _NEEDLE)


def negative(rows: Rows) -> torch.Tensor:
    """Aim at one visible key, with all scores deeply negative."""
    return rows.aimed(rows.visible(), _SHIFTED_NEEDLE) + rows.shifted(rows.channels.offset, -rows.depths())


def positive(rows: Rows) -> torch.Tensor:
    """Aim at one visible key, with all scores so high that their exponentials overflow."""
    return rows.aimed(rows.visible(), _SHIFTED_NEEDLE) + rows.shifted(rows.channels.offset, rows.depths())


def flat_negative(rows: Rows) -> torch.Tensor:
    """Make all scores equal and deeply negative."""
    return rows.shifted(rows.channels.offset, -rows.depths())


def abyss(rows: Rows) -> torch.Tensor:
    """Make all scores equal and more negative than a finite stand-in for -inf."""
    fits = _LARGEST_PRODUCT_FP16 * rows.case.head_dim**-0.5 if rows.case.dtype == "float16" else _ABYSS
    return rows.shifted(rows.channels.offset, -min(_ABYSS, fits))


def sink(rows: Rows) -> torch.Tensor:
    """Give the first key most of the weight."""
    return rows.normal(1.0) + rows.shifted(rows.channels.sink, _SINK + math.log(rows.case.kv_len))


def rising(rows: Rows) -> torch.Tensor:
    """Raise the scores from key to key, so that every tile of keys brings a new maximum."""
    return rows.normal(1.0) + rows.shifted(rows.channels.ramp, _RAMP)


def falling(rows: Rows) -> torch.Tensor:
    """Lower the scores from key to key."""
    return rows.normal(1.0) + rows.shifted(rows.channels.ramp, -_RAMP)


def edges(rows: Rows) -> torch.Tensor:
    """Aim at the first or the last visible key, or at the one beyond: a mask off by one gets another winner."""
    first, last = rows.seen()
    choice = (rows.uniform() * 4).long()
    inside = rows.aimed(torch.where(choice == 0, first, last), _NEEDLE)
    beyond = torch.where(choice == 2, first - 1, last + 1).clamp(0, rows.case.kv_len - 1)
    return torch.where((choice < 2)[:, None], inside, rows.aimed(beyond, _TRAP))


def zeros(rows: Rows) -> torch.Tensor:
    """Make rows of zeros, as padded tokens have."""
    return torch.zeros(len(rows.queries), rows.case.head_dim, device=rows.queries.device)


def zero_some(k: torch.Tensor, kv_heads: int, generator: torch.Generator) -> None:
    """Set some keys (batch * kv_heads, kv_len, head_dim) to zeros, in every other head, or in a single one by chance.

    The other heads keep their rows of deeply negative scores. One of two twins stays, so that a row that is aimed at
    them has a winner.
    """
    heads, device = len(k), k.device
    odd = k[:, 1::2]
    chosen = torch.rand(odd.shape[:2], generator=generator, device=device) < 1 / _ZEROS_EVERY
    if kv_heads > 1:
        of_heads = torch.arange(heads, device=device) % kv_heads % 2 == 1
    else:
        of_heads = torch.rand(heads, generator=generator, device=device) < 1 / 2
    odd.masked_fill_((chosen & of_heads[:, None]).unsqueeze(-1), 0.0)


def silence_some(d_out: torch.Tensor, generator: torch.Generator) -> None:
    """Set the rows of some tokens in d_out (heads, q_len, value_dim) to zeros in all heads: their keys still count."""
    length = d_out.shape[1]
    several = torch.randperm(length, generator=generator, device=d_out.device)[: length // _SILENT_EVERY]
    d_out[:, several] = 0.0
