"""attn_exp.time on a GPU: tensors of a program, judged and timed in its own process."""

from functools import partial

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attn_exp

pytestmark = pytest.mark.gpu

QUICK = {"stopping": {"budget_s": 0.1}}


def tensors():
    generator = torch.Generator("cuda").manual_seed(0)
    return tuple(torch.randn(4, 8, 2048, 64, generator=generator, device="cuda").bfloat16() for _ in range(3))


@pytest.mark.parametrize("passes", [["forward"], ["forward", "backward"]], ids=["forward", "both"])
def test_a_function_has_a_time_and_the_program_its_stream(passes):
    q, k, v = tensors()
    stream, before = torch.cuda.current_stream(), q.clone()
    found = attn_exp.time(partial(sdpa, is_causal=True), q, k, v, causal=True, passes=passes, name="mine", **QUICK)
    assert (found.status, found.reason) == ("ok", None)
    assert torch.cuda.current_stream() == stream and torch.equal(q, before)
    # Four batch rows of 8 heads of 2,048 tokens take no GPU that exists a microsecond, and no H200 a millisecond.
    assert all(1.0 < found.time_us(direction) < 1000.0 for direction in passes)
    again = attn_exp.time(partial(sdpa, is_causal=True), q, k, v, causal=True, name="mine", **QUICK)
    assert again.time_us() == pytest.approx(found.time_us(), rel=0.3)


def test_a_wrong_mask_and_another_scale_are_found():
    q, k, v = tensors()
    assert attn_exp.time(sdpa, q, k, v, causal=True, **QUICK).status == "inaccurate"
    assert attn_exp.time(partial(sdpa, scale=0.1), q, k, v, name="mine", scale=0.1, **QUICK).status == "ok"
    assert attn_exp.time(partial(sdpa, scale=0.1), q, k, v, name="mine", **QUICK).status == "inaccurate"


def test_a_graph_can_hold_a_function():
    q, k, v = tensors()
    found = attn_exp.time(sdpa, q, k, v, name="mine", timer="graph", **QUICK)
    assert found.status == "ok" and found.time_us() > 1.0
