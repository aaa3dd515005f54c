"""Keys and values in pages of a pool, as a server's cache has them.

A request's keys lie in pages of `page_size` slots, anywhere in a pool (pages, page_size, kv_heads, dim), as in
FlashAttention and vLLM. A block table has the index of each page. Slots behind a request's last key and unused pages
hold what other requests left there: here random numbers.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch

from attn_exp.core.case.case import Case

# The scale of an fp8 cache's codes, of keys and of values. Times a power of two they are exact in 16 bits.
CACHE_SCALE = 2.0**-6
_LARGEST_CODE = 448.0
# One page of so many belongs to nobody.
_FREE = 8
# The order of pages, which is the same each time.
_SEED = 20_230_620


@dataclass(frozen=True, eq=False)
class Pages:
    """Positions of a batch's keys in a pool of pages.

    Attributes:
        table: the pages of each request in the order of its keys, int32 (requests, most pages); 0 behind its last page.
        lengths: how many keys each request has, on the host.
        page_size: the slots of a page.
        count: the pages of the pool.
    """

    table: torch.Tensor
    lengths: tuple[int, ...]
    page_size: int
    count: int

    @property
    def pages_of_requests(self) -> tuple[int, ...]:
        """Return how many pages each request has."""
        return tuple(-(-length // self.page_size) for length in self.lengths)

    @property
    def indices(self) -> torch.Tensor:
        """Return the pages of all requests behind each other, int32 (FlashInfer's kv_indices)."""
        rows = zip(self.table, self.pages_of_requests, strict=True)
        return torch.cat([row[:count] for row, count in rows])

    @property
    def keys_of_last_pages(self) -> torch.Tensor:
        """Return how many keys the last page of each request has, int32 (FlashInfer's last_page_len)."""
        counts = [(length - 1) % self.page_size + 1 if length else 0 for length in self.lengths]
        return torch.tensor(counts, dtype=torch.int32, device=self.table.device)

    def slots(self) -> torch.Tensor:
        """Return the slot of each key of all requests behind each other, int64: page x page_size + place in it."""
        rows = []
        for row, length, count in zip(self.table, self.lengths, self.pages_of_requests, strict=True):
            of_page = torch.arange(self.page_size, device=row.device)
            rows.append((row[:count, None].long() * self.page_size + of_page).flatten()[:length])
        return torch.cat(rows)


def pages_of(case: Case, device: torch.device) -> Pages:
    """Return the pages of a paged case, in its order."""
    assert case.page_size is not None
    lengths = case.kv_lengths or case.lengths or (case.kv_len,) * case.batch
    shared = case.shared_keys // case.page_size
    counts = [-(-length // case.page_size) for length in lengths]
    # The first request brings the shared ones.
    own = [counts[0], *(count - shared for count in counts[1:])]
    pool = sum(own) + max(1, sum(own) // _FREE)
    shuffled = torch.randperm(pool, generator=torch.Generator().manual_seed(_SEED))
    order = torch.arange(pool) if case.pages == "linear" else shuffled
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for row, count, pages in zip(table, counts, order[: sum(own)].int().split(own), strict=True):
        row[count - len(pages) : count] = pages
    table[:, :shared] = table[0, :shared].clone()
    return Pages(table.to(device), tuple(lengths), case.page_size, pool)


@torch.no_grad()
def as_cached(case: Case, of_keys_bhsd: torch.Tensor) -> None:
    """Give keys or values the numbers that the cache can have, in place.

    Those in pages that requests share are the first request's; in an fp8 cache they are those of codes.
    """
    if case.cache_dtype is not None:
        of_keys_bhsd.copy_(_numbers(_codes(of_keys_bhsd), of_keys_bhsd.dtype))
    if not (count := case.shared_keys):
        return
    if case.lengths is None:
        of_keys_bhsd[1:, :, :count] = of_keys_bhsd[:1, :, :count].clone()
        return
    for first in accumulate((case.kv_lengths or case.lengths)[:-1]):
        of_keys_bhsd[:, :, first : first + count] = of_keys_bhsd[:, :, :count].clone()


def _codes(numbers: torch.Tensor) -> torch.Tensor:
    scaled = (numbers.float() / CACHE_SCALE).clamp(-_LARGEST_CODE, _LARGEST_CODE)
    # PyTorch does not select rows of codes.
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8)


def _numbers(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (codes.view(torch.float8_e4m3fn).float() * CACHE_SCALE).to(dtype)


class Paging:
    """Turns keys and values of a paged case into pools, and back."""

    def __init__(self, case: Case, pages: Pages) -> None:
        self.pages = pages
        self._rows = case.batch
        self._dtype: torch.dtype = getattr(torch, case.dtype)
        self._in_codes = case.cache_dtype is not None
        # The slots of keys, int64 (batch, kv_len): those of packed sequences lie behind each other as the requests do.
        self.slots = pages.slots().view(case.batch, case.kv_len)

    def free_slots(self) -> torch.Tensor:
        """Return the slots that hold no key, int64."""
        free = torch.ones(self.pages.count * self.pages.page_size, dtype=torch.bool, device=self.slots.device)
        free[self.slots.flatten()] = False
        return free.nonzero().squeeze(1)

    def pool_of(self, tensor_bhsd: torch.Tensor) -> torch.Tensor:
        """Return a new pool that has a tensor of keys or values in its pages, and random numbers elsewhere."""
        heads, dim = tensor_bhsd.shape[1], tensor_bhsd.shape[-1]
        shape, device = (self.pages.count, self.pages.page_size, heads, dim), tensor_bhsd.device
        left = torch.Generator(device).manual_seed(_SEED)
        pool = torch.randn(shape, generator=left, device=device, dtype=tensor_bhsd.dtype)
        pool = _codes(pool).view(torch.float8_e4m3fn) if self._in_codes else pool
        self.write(pool, tensor_bhsd)
        return pool

    def write(self, pool: torch.Tensor, tensor_bhsd: torch.Tensor) -> None:
        """Write a tensor of keys or values into its pages of a pool."""
        rows, into = tensor_bhsd.detach().transpose(1, 2).flatten(0, 1), pool.data
        if self._in_codes:
            rows, into = _codes(rows), into.view(torch.uint8)
        into.flatten(0, 1)[self.slots.flatten()] = rows

    def read(self, pool: torch.Tensor) -> torch.Tensor:
        """Return a copy of what lies in the pages of a pool, (batch, kv_heads, kv_len, dim)."""
        lying = pool.view(torch.uint8) if self._in_codes else pool
        rows = lying.flatten(0, 1).index_select(0, self.slots.flatten())
        rows = _numbers(rows, self._dtype) if self._in_codes else rows
        gathered: torch.Tensor = rows.unflatten(0, (self._rows, -1)).transpose(1, 2)
        return gathered
