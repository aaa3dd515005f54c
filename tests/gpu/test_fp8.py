"""fp8 on a GPU: cuDNN's codes against the reference, what it refuses, and a job from request to record."""

from dataclasses import replace

import pytest
import torch
from fakes import make_request

from attn_exp.attention.error import inaccuracy
from attn_exp.attention.expected import expected
from attn_exp.attention.inputs import make_inputs
from attn_exp.backends.base import load_backend
from attn_exp.backends.package import Refused
from attn_exp.core.case.case import E4M3, Case
from attn_exp.worker.measure import measure

pytestmark = pytest.mark.gpu

CONFIG = {"_target_": "attn_exp.backends.cudnn_graph.CudnnGraph", "name": "cudnn_graph"}
PLAIN = Case(
    batch=2, q_heads=8, kv_heads=8, q_len=1024, kv_len=1024, head_dim=128, value_dim=128, dtype=E4M3, causal=False
)  # fmt: skip
CAUSAL = replace(PLAIN, causal=True)
# What cuDNN has on Hopper by its front end's own rules (sdpa_support_surface.h, sdpa_fp8_bwd.h).
FORWARD = {
    "full": PLAIN,
    "causal": CAUSAL,
    "bshd": replace(PLAIN, layout="bshd"),
    "causal, bshd": replace(CAUSAL, layout="bshd"),
}
BACKWARD = {"full": PLAIN, "causal": CAUSAL, "causal, bshd": replace(CAUSAL, layout="bshd")}
# Right or refused: which, is the version's affair.
PERHAPS = {
    "64": replace(CAUSAL, head_dim=64, value_dim=64),
    "256": replace(CAUSAL, head_dim=256, value_dim=256),
    "192 and 128": replace(CAUSAL, head_dim=192),
    "96": replace(PLAIN, head_dim=96, value_dim=96),
    "grouped": replace(CAUSAL, kv_heads=2),
    "window": replace(CAUSAL, window=100),
    "one token over": replace(CAUSAL, q_len=1025, kv_len=1025),
    "q shorter": replace(PLAIN, q_len=512),
    "top left": replace(CAUSAL, q_len=512, align="top_left"),
    "decode": replace(PLAIN, q_len=1, kv_len=4000),
    "packed": replace(CAUSAL, batch=1, q_len=1000, kv_len=1000, lengths=(300, 600, 1, 99), layout="bshd"),
}


def prepared(case, *, with_gradients, **options):
    pytest.importorskip("cudnn")
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("fp8 begins with compute capability 9.0")
    backend = load_backend(CONFIG | options)
    assert backend.unsupported(case, "cuda") is None
    inputs = make_inputs(case, "cuda", 11, with_gradients=with_gradients)
    return inputs, backend.prepare(case, inputs)


def errors(case, *, with_gradients, **options):
    """Errors of a second call of each pass: the first may only have found its scales."""
    inputs, calls = prepared(case, with_gradients=with_gradients, **options)
    out = calls.forward()
    found = {"out": out}
    if with_gradients:
        backward = calls.backward(out)
        backward()
        found |= dict(zip(("dq", "dk", "dv"), backward(), strict=True))
    calls.forward()
    wanted = expected(case, inputs, with_gradients=with_gradients)
    return {name: wanted.judge(name, tensor, calls.scales[name]) for name, tensor in found.items()}


@pytest.mark.parametrize("api", ["binding", "wrapper"])
@pytest.mark.parametrize("name", FORWARD)
def test_the_output_is_right(name, api):
    found = errors(FORWARD[name], with_gradients=False, api=api)
    assert inaccuracy(found) is None, found


@pytest.mark.parametrize("api", ["binding", "wrapper"])
@pytest.mark.parametrize("name", BACKWARD)
def test_the_gradients_are_right(name, api):
    found = errors(BACKWARD[name], with_gradients=True, api=api)
    assert inaccuracy(found) is None, found


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("name", PERHAPS)
def test_anything_else_is_right_or_refused_in_a_sentence(name, with_gradients):
    try:
        found = errors(PERHAPS[name], with_gradients=with_gradients)
    except Refused as refused:
        print(f"{name}: refused: {refused}")
        return
    print(f"{name}: {found}")
    assert inaccuracy(found) is None, found


@pytest.mark.parametrize("passes", [("forward",), ("forward", "backward")])
def test_a_job_measures_it_by_the_kernels_that_it_claims(machine, passes):
    prepared(PLAIN, with_gradients=False)
    request = make_request(CONFIG, CAUSAL, timer="device", also=("kernel", "graph"), budget_s=0.02, passes=passes)
    record = measure(replace(request, device="cuda"), machine)
    assert record.status == "ok", record.reason
    for direction in passes:
        assert [timing.timer for timing in record.passes[direction].timings][:3] == ["device", "kernel", "graph"]
        assert 0 < record.metrics[f"{direction}/flops_of_peak"] < 1
        assert 0 < record.metrics[f"{direction}/flops_of_measured"] < 1
    assert "e4m3" in record.environment["inputs"]
