"""Which rows of a tensor a judgement looks at: drawn anew from the operating system's entropy for every judgement.

Every head of every row of the batch gets its own: one at random of each group of `GROUP` neighbours, and always the
rows at which kernels err: the first and the last, those on both sides of tile boundaries, and some near the end.
"""

import secrets

import torch

# Of this many neighbours one is looked at. A tile has 64 rows or more, so a wrong tile always is.
GROUP = 8
_TILES = (64, 128, 256)
# Distances from the end at which a mask or a tail may be handled differently.
_FROM_END = (1, 2, 3, 4, 8, 16, 32)
# Scores below which a whole reference is cheap: 4 heads of 1,024 queries and keys.
_LEAST_SCORES = 1 << 22


def fresh_dice() -> torch.Generator:
    """Return a generator on the CPU with a seed that nobody can foresee."""
    return torch.Generator().manual_seed(secrets.randbits(63))


def boundary_rows(length: int) -> list[int]:
    """Return, in order, at most 24 rows of `length` that every judgement looks at.

    They are the first, the rows on both sides of the first boundary of tiles of 64, 128 and 256 rows and of the last
    one, and rows 1 to 32 from the end.
    """
    rows = {0, *(length - distance for distance in _FROM_END)}
    for tile in _TILES:
        last = (length - 1) // tile * tile
        rows |= {tile - 1, tile, last - 1, last}
    return sorted(row for row in rows if 0 <= row < length)


def sampled_length(length: int) -> int:
    """Return how many rows of `length` a judgement looks at; all of them where a part would be most of them."""
    fixed = len(boundary_rows(length))
    part = fixed + -(-(length - fixed) // GROUP)
    return part if 2 * part <= length else length


def worth_sampling(heads: int, q_len: int, kv_len: int) -> bool:
    """Whether a sampled reference is much cheaper than a whole one; `heads` are those of all rows of the batch."""
    return heads * q_len * kv_len >= _LEAST_SCORES and sampled_length(q_len) < q_len


def draw_rows(batch: int, heads: int, length: int) -> torch.Tensor:
    """Return the rows of each head, (batch, heads, `sampled_length`) on the CPU, ascending, without repetition."""
    count = sampled_length(length)
    if count == length:
        return torch.arange(length).expand(batch, heads, length)
    fixed = torch.tensor(boundary_rows(length))
    others = torch.ones(length, dtype=torch.bool)
    others[fixed] = False
    others = others.nonzero().squeeze(1)
    first = torch.arange(0, len(others), GROUP)
    sizes = (len(others) - first).clamp(max=GROUP)
    places = torch.rand(batch, heads, len(first), generator=fresh_dice(), dtype=torch.float64)
    drawn = others[first + (places * sizes).long()]
    rows = torch.cat([drawn, fixed.expand(batch, heads, -1)], dim=-1)
    return rows.sort(dim=-1).values


def rows_of(tensor: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the rows `places` (batch, heads, n) of a tensor (batch, heads, length, dim), as (batch, heads, n, dim)."""
    batch = torch.arange(tensor.shape[0], device=places.device)[:, None, None]
    head = torch.arange(tensor.shape[1], device=places.device)[None, :, None]
    # Codes are copied as bytes, which every device can index.
    bits = tensor.detach().view(torch.uint8) if tensor.element_size() == 1 else tensor.detach()
    return bits[batch, head, places].view(tensor.dtype)
