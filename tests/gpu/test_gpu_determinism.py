"""Bits of results on a GPU: what records say of PyTorch's kernels, and what this file sees by itself."""

from dataclasses import replace

import pytest
import torch
from fakes import make_request
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_exp.core.case.case import Case
from attn_exp.worker.measure import measure

pytestmark = pytest.mark.gpu

TRAINING = Case(
    batch=4, q_heads=16, kv_heads=16, q_len=1024, kv_len=1024, head_dim=128, value_dim=128, dtype="bfloat16",
    causal=True, align="top_left",
)  # fmt: skip
DECODING = replace(TRAINING, batch=8, q_len=1, kv_len=8192, align="bottom_right")


def measured(machine, backend, case, **options):
    config = {"_target_": f"attn_exp.backends.{backend}", "name": "fake", **options}
    passes = ("forward", "backward") if case is TRAINING else ("forward",)
    way = {"timer": "device", "budget_s": 0.02, "l2": "cold", "passes": passes, "determinism": True}
    record = measure(replace(make_request(config, case, **way), device="cuda"), machine)
    assert (record.status, record.reason) == ("ok", None)
    return record


def attention(q, k, v):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)


def tensors(case, count):
    shape = (case.batch, case.q_heads, case.kv_len, case.head_dim)
    made = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    made[0] = made[0][:, :, : case.q_len].contiguous()
    return made


@pytest.mark.parametrize("deterministic", [False, True])
def test_flashs_backward_repeats_its_bits_if_it_is_asked_to(machine, deterministic):
    q, k, v, d_out = tensors(TRAINING, 4)
    leaves = [one.requires_grad_() for one in (q, k, v)]
    out = attention(*leaves)
    torch.use_deterministic_algorithms(deterministic)
    try:
        every = [torch.autograd.grad(out, leaves, d_out, retain_graph=True) for _ in range(100)]
    finally:
        torch.use_deterministic_algorithms(False)
    same = all(torch.equal(one, usual) for several in every for one, usual in zip(several, every[0], strict=True))
    facts = {
        name: one.bitwise
        for name, one in measured(machine, "sdpa.Flash", TRAINING, deterministic=deterministic).passes.items()
    }
    assert facts["forward"]["calls"].same is True
    assert facts["backward"]["calls"].same is same is deterministic
    if not deterministic:
        # Only dq is a sum of several blocks' atomic additions.
        assert facts["backward"]["calls"].first.tensor == "dq"
        assert facts["backward"]["calls"].differing > 50


def test_flashs_decoding_splits_the_keys_by_the_batch(machine):
    q, k, v = tensors(DECODING, 3)
    same = torch.equal(attention(q, k, v)[:1], attention(q[:1], k[:1], v[:1]))
    facts = measured(machine, "sdpa.Flash", DECODING).passes["forward"].bitwise
    assert facts["calls"].same is True
    assert facts["batch_sizes"].same is same is False


def test_our_own_kernel_repeats_its_bits_in_every_call_and_position(machine):
    # Of another size another configuration may be the fastest, and sums in another order.
    for measured_pass in measured(machine, "triton.Triton", TRAINING).passes.values():
        assert [measured_pass.bitwise[way].same for way in ("calls", "positions")] == [True, True]
