"""Latent keys, whose first channels are their values: against brute force, in place, judged, and who has them."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import Honest, make_request
from standins import install, plain
from test_measure import CEILINGS, machine, short_rounds  # noqa: F401  (fixtures)

from attn_exp.attention.error import inaccuracy
from attn_exp.attention.expected import expected
from attn_exp.attention.formula import formula, hidden_keys
from attn_exp.attention.inputs import Inputs, make_inputs
from attn_exp.attention.reference import reference
from attn_exp.backends.base import Calls, calls_of
from attn_exp.backends.flashmla import FlashMla
from attn_exp.backends.flex import flex_function
from attn_exp.backends.triton import Triton
from attn_exp.core.case.case import Case
from attn_exp.core.case.flops import compulsory_bytes, flops, seen_keys
from attn_exp.worker.measure import measure

CPU = torch.device("cpu")


def case(**sizes: Any) -> Case:
    base = {"batch": 2, "q_heads": 8, "kv_heads": 1, "q_len": 1, "kv_len": 40, "head_dim": 24, "value_dim": 16}
    return Case(**(base | {"dtype": "float32", "causal": True, "latent": True} | sizes))


def random_case(seed: int) -> Case:
    draw = random.Random(seed)
    kv_heads, causal, q_len = draw.choice((1, 1, 2)), draw.random() < 0.7, draw.choice((1, 1, 2, draw.randint(1, 30)))
    mask = {draw.choice(("window", "prefix", "chunk")): draw.randint(1, 40)} if causal and draw.random() < 0.4 else {}
    sizes: dict[str, Any] = {"batch": draw.choice((1, 2, 3)), "q_len": q_len, "kv_len": q_len + draw.randint(0, 40)}
    if draw.random() < 0.3:
        lengths = tuple(draw.randint(1, 3) for _ in range(3))
        kv_lengths = tuple(length + draw.randint(0, 20) for length in lengths)
        sizes = {"batch": 1, "q_len": sum(lengths), "kv_len": sum(kv_lengths)}
        sizes |= {"lengths": lengths, "kv_lengths": kv_lengths}
    value_dim = draw.choice((8, 16, 24))
    return case(
        q_heads=kv_heads * draw.choice((1, 2, 6)), kv_heads=kv_heads, head_dim=value_dim + draw.choice((0, 1, 8)),
        value_dim=value_dim, causal=causal, softcap=draw.choice((None, None, 5.0)), sink=draw.random() < 0.2,
        alibi=draw.random() < 0.2, layout=draw.choice(("bhsd", "bshd")), **sizes, **mask,
    )  # fmt: skip


def brute_force(case: Case, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return the output in float64, of queries and keys and nothing else."""
    without = replace(case, latent=False)
    mask = hidden_keys(case, 0, case.q_len, CPU)
    from attn_exp.attention.scores import bias_tensor, sinks_of

    sinks, bias = sinks_of(case, CPU), bias_tensor(case, CPU, torch.float64)
    values = torch.stack([k[..., channel] for channel in range(case.value_dim)], -1)
    return formula(without, mask, q.double(), k.double(), values.double(), sinks, bias)


def off(found: torch.Tensor, right: torch.Tensor) -> float:
    """Return how far a tensor is from what is right, relative to its norm."""
    return float((found.detach().double() - right).norm() / right.norm().clamp(min=1e-9))


def test_the_reference_equals_brute_force() -> None:
    for seed in range(30):
        one = random_case(seed)
        inputs = make_inputs(one, "cpu", seed, with_gradients=False)
        found = reference(one, inputs, with_gradients=False, precision=torch.float64)["out"]
        assert off(found, brute_force(one, inputs.q_bhsd, inputs.k_bhsd)) < 1e-6, one


def test_bytes_count_a_latent_once_and_products_are_those_of_both() -> None:
    for seed in range(60):
        one = random_case(seed)
        apart = replace(one, latent=False)
        keys = one.batch * one.kv_heads * seen_keys(one)
        inputs = make_inputs(one, "cpu", seed, with_gradients=False)
        # Every number of k and v that is read, by its place in memory.
        places = torch.arange(inputs.k_bhsd.numel()).view(one.batch, one.kv_heads, one.kv_len, one.head_dim)
        seen = (~hidden_keys(one, 0, one.q_len, CPU)).any(0)
        read = torch.cat([places[:, :, seen].flatten(), places[:, :, seen, : one.value_dim].flatten()]).unique()
        assert len(read) == keys * one.head_dim
        for direction in ("forward", "backward", "step"):
            assert flops(one, direction) == flops(apart, direction)
        less = compulsory_bytes(apart, "forward", saves_lse=True) - compulsory_bytes(one, "forward", saves_lse=True)
        assert less == 4 * keys * one.value_dim
        rows = one.batch * one.q_heads * one.q_len
        of_queries = 4 * rows * (one.head_dim + one.value_dim) + 4 * one.q_heads * one.sink
        assert compulsory_bytes(one, "forward", saves_lse=False) == of_queries + 4 * len(read)


class Mistaken(Honest):
    """Eager whose values are others than a key's first channels, or those of an earlier call."""

    def __init__(self, name: str, mistake: str) -> None:
        super().__init__(name)
        self.mistake = mistake

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        mask = None if case.dense else hidden_keys(case, 0, case.q_len, CPU)
        kept = inputs.v_bhsd.clone()

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            values = {
                "last channels": k[..., -case.value_dim :],
                "kept": kept,
                "by one": k[..., : case.value_dim].roll(1, -1),
                "right": k[..., : case.value_dim],
            }
            return formula(case, mask, q, k, values[self.mistake])

        return calls_of(attention, inputs)


WRONG = ["last channels", "kept", "by one"]


@pytest.mark.parametrize("mistake", [*WRONG, "right"])
def test_a_job_is_judged_on_fresh_latents(mistake: str, machine: Any) -> None:  # noqa: F811
    one = case(kv_len=64, head_dim=40, value_dim=32)
    backend = {"_target_": "test_latent.Mistaken", "name": "it", "mistake": mistake}
    record = measure(make_request(backend, one, passes=("forward",)), machine)
    assert record.status == ("ok" if mistake == "right" else "inaccurate"), record.reason


@pytest.mark.parametrize("seed", range(0, 24, 6))
def test_flex_has_them_as_tensors(seed: int) -> None:
    one = replace(random_case(seed), sink=False)
    inputs = make_inputs(one, "cpu", seed, with_gradients=False)
    found = flex_function(one, CPU, {})(*inputs.qkv)
    assert off(found, reference(one, inputs, with_gradients=False, precision=torch.float64)["out"]) < 1e-5


PAGED = {"page_size": 64, "kv_len": 150, "q_len": 2}
MLA = case(q_heads=16, kv_len=192, head_dim=576, value_dim=512, dtype="bfloat16")


@pytest.mark.parametrize("changes", [{"layout": "bshd", "q_len": 3, "causal": False}, PAGED])
def test_flashmla_gets_pages_and_a_plan(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []

    def get_mla_metadata(*arguments: Any) -> tuple[str, None]:
        planned.append(arguments)
        return "plan", None

    def flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
        softmax_scale=None, causal=False,
    ):  # fmt: skip
        assert (tile_scheduler_metadata, num_splits, head_dim_v, softmax_scale) == ("plan", None, 512, 576**-0.5)
        assert k_cache.shape[1:] == (64, 1, 576) and block_table.dtype == cache_seqlens.dtype == torch.int32
        outs = []
        for row, table, length in zip(q, block_table.tolist(), cache_seqlens.tolist(), strict=True):
            keys = torch.cat([k_cache[page] for page in table[: -(-length // 64)]])[None, :length]
            outs.append(plain(row[None], keys, keys[..., :512], -1, 0 if causal else -1))
        return torch.cat(outs), None

    library = {"get_mla_metadata": get_mla_metadata, "flash_mla_with_kvcache": flash_mla_with_kvcache}
    install(monkeypatch, "flash_mla", **library)
    one = replace(MLA, **changes)
    inputs = make_inputs(one, "cpu", 3, with_gradients=False)
    calls = FlashMla("flashmla").prepare(one, inputs)
    right = expected(one, inputs, with_gradients=False)
    assert inaccuracy({"out": right.judge("out", calls.forward())}) is None
    assert len(planned) == 1 and planned[0][1:] == (one.q_len * 16, 1)
    # The pages are the inputs: what changes in place is read.
    assert calls.inputs is not None and calls.inputs.operands[1].data_ptr() == calls.inputs.operands[2].data_ptr()


@pytest.mark.parametrize(
    ("backend", "changes", "says"),
    [
        (FlashMla, {}, None),
        (FlashMla, {"latent": False}, "has only latent values: set latent=true"),
        (FlashMla, {"kv_len": 100}, "has pages of 64 keys: set a kv_len that is a multiple, not 100"),
        (FlashMla, {"head_dim": 576, "value_dim": 576}, "576 only with values of 512"),
        (FlashMla, {"head_dim": 128, "value_dim": 64}, "takes different head dimensions only of 576 and 512"),
        (FlashMla, PAGED, None),
        (FlashMla, {"page_size": 16}, "has pages of 64 keys, not 16: set page_size=64"),
        (Triton, {}, "has head dimensions up to 256, not 576"),
        (Triton, {"head_dim": 192, "value_dim": 128}, None),
    ],
)
def test_a_refusal_of_latent_is_said(backend: Any, changes: dict[str, Any], says: str | None, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    said = backend("it").unsupported(replace(MLA, **changes), "cuda")
    assert said is None if says is None else says in said
