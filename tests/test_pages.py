"""Paged caches: pools and block tables, fresh in place, judged against what lies in the pages, and who reads them."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import Honest, make_request
from test_measure import CEILINGS, machine, short_rounds  # noqa: F401  (fixtures)

from attn_exp.attention.formula import formula, hidden_keys
from attn_exp.attention.hard_values import make_inputs_of
from attn_exp.attention.inputs import Inputs, make_inputs, paged
from attn_exp.attention.pages import CACHE_SCALE, Pages, Paging, pages_of
from attn_exp.attention.reference import reference
from attn_exp.attention.tolerance import part_of
from attn_exp.backends.base import Calls, calls_of, supported_passes
from attn_exp.backends.eager import Eager
from attn_exp.backends.fa2 import FlashAttention2
from attn_exp.backends.flashinfer import FlashInfer
from attn_exp.backends.supports import Supports
from attn_exp.backends.triton import Triton
from attn_exp.core.case.case import Case
from attn_exp.core.case.features import PAGES
from attn_exp.core.case.flops import compulsory_bytes, flops
from attn_exp.hunt.example import Example
from attn_exp.results.duel_command import case_words
from attn_exp.worker.check.serving import shortened
from attn_exp.worker.measure import measure

CPU = torch.device("cpu")


def case(**sizes: Any) -> Case:
    base = {"batch": 3, "q_heads": 4, "kv_heads": 2, "q_len": 1, "kv_len": 40, "head_dim": 16, "dtype": "float32"}
    given = base | {"causal": True, "page_size": 16} | sizes
    return Case(**({"value_dim": given["head_dim"]} | given))


def random_case(seed: int) -> Case:
    draw = random.Random(seed)
    kv_heads, causal, q_len = draw.choice((1, 2)), draw.random() < 0.7, draw.choice((1, 1, draw.randint(1, 20)))
    mask = {draw.choice(("window", "prefix", "chunk")): draw.randint(1, 40)} if causal and draw.random() < 0.5 else {}
    sizes: dict[str, Any] = {"batch": draw.choice((1, 2, 3)), "q_len": q_len, "kv_len": q_len + draw.randint(0, 60)}
    if draw.random() < 0.5:
        lengths = (*(draw.randint(0, 5) for _ in range(draw.randint(0, 3))), draw.randint(1, 5))
        kv_lengths = draw.choice((None, tuple(length + draw.randint(0, 30) for length in lengths)))
        sizes = {"batch": 1, "q_len": sum(lengths), "kv_len": sum(kv_lengths or lengths)}
        sizes |= {"lengths": lengths, "kv_lengths": kv_lengths}
    latent = draw.random() < 0.3
    return case(
        q_heads=kv_heads * draw.choice((1, 2)), kv_heads=kv_heads, head_dim=24, value_dim=draw.choice((8, 24)),
        causal=causal, softcap=draw.choice((None, None, 5.0)), sink=draw.random() < 0.2, latent=latent,
        layout=draw.choice(("bhsd", "bshd")), page_size=draw.choice((1, 2, 3, 7, 16, 64, 256)),
        pages=draw.choice(PAGES), cache_dtype=draw.choice((None, "fp8")), **sizes, **mask,
    )  # fmt: skip


def by_hand(pages: Pages, pool: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the keys of all requests, walked key by key through the block table, (batch, heads, kv_len, dim)."""
    keys = [
        pool[int(pages.table[request, key // pages.page_size]), key % pages.page_size]
        for request, length in enumerate(pages.lengths)
        for key in range(length)
    ]
    return torch.stack(keys).unflatten(0, (rows, -1)).transpose(1, 2)


def off(found: torch.Tensor, right: torch.Tensor) -> float:
    """Return how far a tensor is from what is right, relative to its norm."""
    return float((found.detach().double() - right.double()).norm() / right.double().norm().clamp(min=1e-9))


def test_the_result_is_of_the_keys_that_the_table_names() -> None:
    for seed in range(200):
        one = random_case(seed)
        inputs = make_inputs(one, "cpu", seed, with_gradients=False)
        calls = Eager("eager").prepare(one, inputs)
        read = calls.inputs
        assert isinstance(read, Inputs) and read.paging is not None
        in_codes = one.cache_dtype is not None
        assert (read.k_bhsd.element_size() == 1) == in_codes
        pools = (pool.float() * CACHE_SCALE if in_codes else pool for pool in (read.k_bhsd, read.v_bhsd))
        k, v = (by_hand(read.paging.pages, pool, one.batch) for pool in pools)
        assert torch.equal(k, inputs.k_bhsd) and torch.equal(v, inputs.v_bhsd)
        # As without pages.
        right = reference(replace(one, page_size=None), inputs, with_gradients=False, precision=torch.float64)["out"]
        assert off(calls.forward(), right) < 1e-5, one
        assert (read.v_bhsd.data_ptr() == read.k_bhsd.data_ptr()) == one.latent
        assert len(set(read.paging.pages.indices.tolist())) < read.paging.pages.count


def test_bytes_are_those_of_the_keys_and_of_the_tables_entries_that_are_seen() -> None:
    for seed in range(200):
        one = random_case(seed)
        pages = pages_of(one, CPU)
        without = replace(one, page_size=None)
        seen = (~hidden_keys(one, 0, one.q_len, CPU)).any(0).repeat(one.batch)
        # What one request has read does not count for the next, and codes have a byte.
        slots = pages.slots()[seen]
        numbers = one.kv_heads * one.kv_dims
        fewer = numbers * (4 * len(slots) - (4 if one.cache_dtype is None else 1) * len(slots.unique()))
        entries, key = 0, 0
        for length in pages.lengths:
            own = seen[key : key + length].tolist()
            entries += len({place // pages.page_size for place, sees in enumerate(own) if sees})
            key += length
        for direction in ("forward", "backward", "step"):
            assert flops(one, direction) == flops(without, direction)
            more = compulsory_bytes(one, direction, saves_lse=True)
            assert more - compulsory_bytes(without, direction, saves_lse=True) == 4 * entries - fewer, one


class Mistaken(Honest):
    """Eager from pages, with a mistake that kernels for paged caches have had."""

    def __init__(self, name: str, mistake: str) -> None:
        super().__init__(name)
        self.mistake = mistake

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        read = paged(case, inputs)
        assert read.paging is not None
        paging, mistake = read.paging, self.mistake
        pages, size, given, before = paging.pages, case.page_size, inputs.k_bhsd, inputs.k_bhsd.clone()
        assert size is not None
        mask = None if case.dense else hidden_keys(case, 0, case.q_len, CPU)
        if mistake == "mask aligned top left":
            mask = torch.ones(case.q_len, case.kv_len, dtype=torch.bool).triu(1)
        if mistake == "lengths of another request":
            mask = hidden_keys(replace(case, kv_lengths=(case.kv_lengths or ())[::-1]), 0, case.q_len, CPU)

        def gathered(pool: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return Paging(case, replace(pages, table=table)).read(pool)

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = paging.read(k), paging.read(v)
            if mistake == "pages of another request":
                keys, values = (gathered(pool, pages.table.roll(1, 0)) for pool in (k, v))
            if mistake == "pages of the first request":
                keys, values = (gathered(pool, pages.table[:1].expand_as(pages.table)) for pool in (k, v))
            if mistake == "table off by one":
                keys, values = (gathered(pool, (pages.table + 1) % pages.count) for pool in (k, v))
            if mistake == "values in the keys' order of heads":
                values = values.flip(1)
            if mistake == "last page left out":
                full = case.kv_len // size * size
                keys, values, own = keys[:, :, :full], values[:, :, :full], None if mask is None else mask[:, :full]
                return formula(case, own, q, keys, values)
            if mistake == "all slots of the last page":
                slots = (pages.table[..., None].long() * size + torch.arange(size)).flatten(1)
                keys, values = (pool.flatten(0, 1)[slots].transpose(1, 2) for pool in (k, v))
                return formula(case, None, q, keys, values)
            if mistake == "in the order of the pool":
                count = paging.slots.numel()
                keys = k.flatten(0, 1)[:count].unflatten(0, (case.batch, -1)).transpose(1, 2)
            if mistake == "given tensors":
                keys = given
            if mistake == "scale of another cache":
                values = values * 2
            if mistake == "a stale page":
                keys = torch.cat([before[:, :, :size], keys[:, :, size:]], dim=2)
            if mistake == "splits merged without their maximum":
                halves = [
                    formula(case, None, q, *parts) for parts in zip(keys.chunk(2, 2), values.chunk(2, 2), strict=True)
                ]
                return sum(halves[1:], halves[0]) / 2
            return formula(case, mask, q, keys, values)

        return calls_of(attention, read)


MISTAKES = [
    *("pages of another request", "pages of the first request", "table off by one", "last page left out"),
    *("values in the keys' order of heads", "all slots of the last page", "in the order of the pool", "given tensors"),
    *("a stale page", "splits merged without their maximum", "scale of another cache"),
]
# What only shows where requests differ, or have several queries.
OF_REQUESTS = ["lengths of another request", "mask aligned top left"]
UNEQUAL = {"batch": 1, "lengths": (3, 2, 4), "kv_lengths": (40, 21, 9), "q_len": 9, "kv_len": 70}


def judged(mistake: str, machine: Any, **sizes: Any) -> Any:  # noqa: F811
    backend = {"_target_": "test_pages.Mistaken", "name": "it", "mistake": mistake}
    return measure(make_request(backend, case(head_dim=32, **sizes), passes=("forward",)), machine)


@pytest.mark.parametrize("mistake", [*MISTAKES, *OF_REQUESTS])
def test_a_mistake_in_reading_pages_is_found(mistake: str, machine: Any) -> None:  # noqa: F811
    record = judged(mistake, machine, **UNEQUAL if mistake in OF_REQUESTS else {"kv_len": 40})
    assert record.status == "inaccurate", (mistake, record.reason)


@pytest.mark.parametrize("pages", PAGES)
@pytest.mark.parametrize("cache_dtype", [None, "fp8"])
@pytest.mark.parametrize("sizes", [{"kv_len": 40}, UNEQUAL | {"page_size": 4}], ids=["batch", "requests"])
def test_pages_in_any_order_are_read_right(pages: str, cache_dtype: Any, sizes: Any, machine: Any) -> None:  # noqa: F811
    record = judged("none", machine, pages=pages, cache_dtype=cache_dtype, **sizes)
    assert record.status == "ok", record.reason
    of_requests, in_all = (record.metrics.get(f"forward/{name}") for name in ("min_bytes_of_requests", "min_bytes"))
    assert (of_requests is not None and in_all < of_requests) == (pages == "shared")


def test_requests_share_the_first_half_of_what_the_shortest_fills() -> None:
    one = case(kv_len=70, pages="shared")
    assert one.shared_keys == 32
    pages = pages_of(one, CPU)
    assert torch.equal(pages.table[:, :2], pages.table[:1, :2].expand(3, 2))
    assert len(pages.table.unique()) == 2 + 3 * 3
    inputs = make_inputs_of("mixed", one, "cpu", 1, with_gradients=False)
    assert torch.equal(inputs.k_bhsd[0, :, :32], inputs.k_bhsd[2, :, :32])
    assert not torch.equal(inputs.k_bhsd[0, :, 32:48], inputs.k_bhsd[2, :, 32:48])
    linear = pages_of(replace(one, pages="linear"), CPU)
    assert linear.indices.tolist() == list(range(15))


class Ignores(Honest):
    """Computes on the tensors that were gathered for the judge."""

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        return super().prepare(replace(case, page_size=None), inputs)


def test_a_backend_that_ignores_pages_is_not_measured(machine: Any) -> None:  # noqa: F811
    record = measure(make_request("test_pages.Ignores", case(), passes=("forward",)), machine)
    assert (record.status, record.metrics) == ("unsupported", {})
    assert record.reason == "fake reads no pages: set cache=contiguous, or see attn-exp backends"


def test_a_backward_is_unsupported_with_a_sentence(machine: Any) -> None:  # noqa: F811
    record = measure(make_request("fakes.Honest", case()), machine)
    assert (record.status, record.reason) == (
        "unsupported",
        "a paged cache is measured forward only, as in serving: set passes=[forward]",
    )
    assert supported_passes(Eager("eager"), case()) == ("forward",)


LIBRARY = case(kv_len=600, head_dim=64, dtype="bfloat16", page_size=256)
REQUESTS = replace(LIBRARY, batch=1, lengths=(1, 7), kv_lengths=(300, 20), q_len=8, kv_len=320)


@pytest.mark.parametrize(
    ("backend", "one", "says"),
    [
        (FlashAttention2, LIBRARY, None),
        (FlashAttention2, replace(LIBRARY, page_size=16), "has pages of 256 keys, not 16: set page_size=256"),
        (FlashAttention2, REQUESTS, "has no paged cache of packed sequences: set lengths=null, or cache=contiguous"),
        (FlashInfer, REQUESTS, None),
        (Triton, REQUESTS, None),
    ],
)
def test_some_backends_read_pages(backend: Any, one: Case, says: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    said = backend("it").unsupported(one, "cuda")
    assert said is None if says is None else says in str(said)


def test_a_case_is_typed_with_its_pages_and_other_sizes_are_refused() -> None:
    one = case(page_size=64)
    assert "page_size=64" in case_words(one, "") and one.label().endswith(" page64")
    assert Example(case=one, backward=False).fields["page_size"] == 64
    some = Supports(devices=("cpu",), dtypes=("float32",), features=("paged",), page_sizes=(16, 32))
    assert some.refusal(one, "cpu") == "has pages of 16 or 32 keys, not 64: set page_size=16"
    assert some.refusal(case(page_size=32), "cpu") is None


def test_requests_without_a_query_are_in_no_part_of_a_case() -> None:
    empty = case(batch=1, lengths=(0, 1, 0), kv_lengths=(4096, 32, 32), q_len=1, kv_len=4160)
    # Half of a page less, of those that have a query.
    shorter = shortened(empty)
    assert shorter is not None and (shorter.lengths, shorter.kv_lengths) == ((1,), (24,))
    assert shortened(replace(empty, lengths=(16, 0, 0), q_len=16, kv_lengths=(16, 32, 32), kv_len=80)) is None
    # Tolerances are of the first requests that have one.
    long = case(batch=1, page_size=None, lengths=(0, 5000), kv_lengths=(5000, 5000), q_len=5000, kv_len=10000)
    part, inputs = part_of(long, make_inputs(long, "cpu", 1, with_gradients=False))
    assert part.lengths is not None and part.lengths[0] == part.q_len == inputs.q_bhsd.shape[2] > 0
