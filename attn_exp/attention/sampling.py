"""Rows of a tensor that a judgement looks at: drawn anew from the operating system's entropy for every judgement.

Every head of every row of the batch gets its own: one at random of each group of `group_of` neighbours, and the rows at
which kernels err. The latter are the first and the last, those on both sides of tile boundaries, and some near the end.
"""

import secrets
from dataclasses import dataclass
from functools import cached_property

import torch

# One of so many neighbours is looked at. A tile has 64 rows or more, so a wrong tile always is.
GROUP, _LARGEST_GROUP = 8, 32
# Rows of a head beyond which groups grow: so many show what a norm or a mean can show.
_ENOUGH_ROWS = 256
_TILES = (64, 128, 256)
# Distances from the end at which a mask or a tail may be handled differently.
_FROM_END = (1, 2, 3, 4, 8, 16, 32)
# Scores below which a whole reference is cheap: 4 heads of 1,024 queries and keys.
_LEAST_SCORES = 1 << 22
# Scores of the heads of which gradients of keys are computed, since these need all queries: 32 heads of 8,192 tokens.
_SCORES_OF_KEYS = {"cuda": 1 << 31, "cpu": 1 << 25}


def fresh_dice() -> torch.Generator:
    """Return a generator on the CPU with a seed that nobody can foresee."""
    return torch.Generator().manual_seed(secrets.randbits(63))


def boundary_rows(length: int) -> list[int]:
    """Return, in order, at most 20 rows of `length` that every judgement looks at.

    They are the first row, rows 1 to 32 from the end, and rows beside tile boundaries: the first and the last one of
    tiles of 64, 128 and 256 rows.
    """
    rows = {0, *(length - distance for distance in _FROM_END)}
    for tile in _TILES:
        last = (length - 1) // tile * tile
        rows |= {tile - 1, tile, last - 1, last}
    return sorted(row for row in rows if 0 <= row < length)


def group_of(length: int) -> int:
    """Return of how many neighbours one is looked at in a tensor of `length` rows: 8 up to 2,303, 32 from 8,192 on."""
    return min(max(GROUP, length // _ENOUGH_ROWS), _LARGEST_GROUP)


def sampled_length(length: int) -> int:
    """Return how many rows of `length` a judgement looks at; all of them where a part would be most of them."""
    fixed = len(boundary_rows(length))
    part = fixed + -(-(length - fixed) // group_of(length))
    return part if 2 * part <= length else length


def worth_sampling(heads: int, q_len: int, kv_len: int) -> bool:
    """Whether a sampled reference is much cheaper than a whole one; `heads` are those of all rows of the batch."""
    return heads * q_len * kv_len >= _LEAST_SCORES and sampled_length(q_len) < q_len


def draw_heads(heads: int, scores: int, device: str) -> torch.Tensor:
    """Return, ascending on the CPU, the heads whose gradients of keys are computed: all of them if they are affordable.

    `heads` are the key-value heads of the batch, `scores` those of one of them with all its queries.
    """
    count = max(1, _SCORES_OF_KEYS[device] // scores)
    if count >= heads:
        return torch.arange(heads)
    return torch.randperm(heads, generator=fresh_dice())[:count].sort().values


@dataclass(frozen=True)
class Places:
    """Rows of some heads of a tensor (batch, heads, length, dim).

    Attributes:
        heads: their indices, (m,), ascending, counted over the batch.
        rows: the rows of each head, (m, n), ascending, without repetition.
        heads_of_batch_row: how many heads a row of the batch has.
    """

    heads: torch.Tensor
    rows: torch.Tensor
    heads_of_batch_row: int

    @classmethod
    def drawn(cls, heads: torch.Tensor, length: int, heads_of_batch_row: int) -> "Places":
        """Draw rows of these heads, on the CPU."""
        return cls(heads, draw_rows(len(heads), length), heads_of_batch_row)

    def to(self, device: torch.device) -> "Places":
        """Return the same on a device."""
        return Places(self.heads.to(device), self.rows.to(device), self.heads_of_batch_row)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return these rows of a tensor as (1, m, n, dim)."""
        batch, head = self._batch_and_head
        if tensor.element_size() == 1:
            # Codes are copied as bytes, which every device can index.
            return tensor.detach().view(torch.uint8)[batch, head, self.rows].view(tensor.dtype).unsqueeze(0)
        return tensor.detach()[batch, head, self.rows].unsqueeze(0)

    @cached_property
    def _batch_and_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row of the batch and the head in it of each head, (m, 1)."""
        heads = self.heads[:, None]
        return heads // self.heads_of_batch_row, heads % self.heads_of_batch_row


def draw_rows(heads: int, length: int) -> torch.Tensor:
    """Return rows of each head, (heads, `sampled_length`) on the CPU, ascending, without repetition."""
    count = sampled_length(length)
    if count == length:
        return torch.arange(length).expand(heads, length)
    fixed = torch.tensor(boundary_rows(length))
    others = torch.ones(length, dtype=torch.bool)
    others[fixed] = False
    others = others.nonzero().squeeze(1)
    group = group_of(length)
    first = torch.arange(0, len(others), group)
    sizes = (len(others) - first).clamp(max=group)
    places = torch.rand(heads, len(first), generator=fresh_dice(), dtype=torch.float64)
    drawn = others[first + (places * sizes).long()]
    return torch.cat([drawn, fixed.expand(heads, -1)], dim=-1).sort(dim=-1).values
