import re
from dataclasses import replace

import pytest
import torch
from fakes import make_request
from torch.nn.functional import scaled_dot_product_attention

from attn_exp.attention.error import inaccuracy
from attn_exp.attention.expected import expected
from attn_exp.attention.inputs import make_inputs
from attn_exp.backends.base import load_backend
from attn_exp.backends.package import Refused
from attn_exp.core.case.case import Case
from attn_exp.timers.trace import trace
from attn_exp.worker.measure import measure

pytestmark = pytest.mark.gpu

CONFIG = {"_target_": "attn_exp.backends.cudnn_graph.CudnnGraph", "name": "cudnn_graph"}
# GPT-2's size, as cuDNN's own notebook has it.
NOTEBOOK = Case(
    batch=4, q_heads=12, kv_heads=12, q_len=1024, kv_len=1024, head_dim=64, value_dim=64, dtype="float16", causal=True
)  # fmt: skip
PLAIN = replace(NOTEBOOK, batch=2, q_heads=8, kv_heads=8, q_len=512, kv_len=512, dtype="bfloat16")
PACKED = replace(PLAIN, batch=1, q_len=1000, kv_len=1000, lengths=(300, 600, 1, 99))
BOTH_APIS = {
    "full": replace(PLAIN, causal=False),
    "causal": PLAIN,
    "grouped": replace(PLAIN, kv_heads=2),
    "bshd": replace(PLAIN, layout="bshd"),
    "bottom right": replace(PLAIN, q_len=300, kv_len=777),
    "top left": replace(PLAIN, q_len=300, kv_len=777, align="top_left"),
    "top left, more queries": replace(PLAIN, q_len=777, kv_len=300, align="top_left"),
    "window": replace(PLAIN, window=100),
    "window of one key": replace(PLAIN, window=1),
    "window, bottom right": replace(PLAIN, q_len=300, kv_len=777, window=100),
    "192 and 128": replace(PLAIN, head_dim=192, value_dim=128),
    "256": replace(PLAIN, head_dim=256, value_dim=256, dtype="float16"),
    "40": replace(PLAIN, head_dim=40, value_dim=40),
    "one token over": replace(PLAIN, q_len=513, kv_len=513),
    "decode": replace(PLAIN, q_heads=32, q_len=1, kv_len=4000),
    "decode, window": replace(PLAIN, q_heads=32, q_len=1, kv_len=4000, window=300),
}
BINDING = {
    "packed": PACKED,
    "packed, bshd": replace(PACKED, layout="bshd"),
    "packed, full": replace(PACKED, causal=False),
    "packed, grouped": replace(PACKED, kv_heads=2, layout="bshd"),
}


def prepared(case, inputs, **options):
    pytest.importorskip("cudnn")
    backend = load_backend(CONFIG | options)
    assert backend.unsupported(case, "cuda") is None
    return backend, backend.prepare(case, inputs)


def run(calls):
    """Output and gradients, from calls that had to write them anew."""
    out = calls.forward()
    backward = calls.backward(out)
    for tensor in (out, *backward()):
        tensor.fill_(float("nan"))
    out = calls.forward()
    return dict(zip(("out", "dq", "dk", "dv"), (out, *backward()), strict=True))


@pytest.fixture
def poisoned():
    """Whatever is allocated without being set is full of NaN: workspace, statistics and outputs."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def check(case, **options):
    inputs = make_inputs(case, "cuda", 11, with_gradients=True)
    _, calls = prepared(case, inputs, **options)
    found = run(calls)
    known = expected(case, inputs, with_gradients=True)
    assert inaccuracy({name: known.judge(name, tensor) for name, tensor in found.items()}) is None


@pytest.mark.parametrize("api", ["binding", "wrapper"])
@pytest.mark.parametrize("name", BOTH_APIS)
def test_output_and_gradients_are_right(poisoned, name, api):
    check(BOTH_APIS[name], api=api)


@pytest.mark.parametrize("api", ["binding", "wrapper"])
def test_the_output_agrees_with_pytorch_within_the_notebook_s_tolerances(api):
    case = replace(NOTEBOOK, layout="bshd")
    inputs = make_inputs(case, "cuda", 11, with_gradients=True)
    _, calls = prepared(case, inputs, api=api)
    out = run(calls)["out"].detach()
    for dtype in (torch.float16, torch.float32):
        known = scaled_dot_product_attention(*(one.detach().to(dtype) for one in inputs.qkv), is_causal=True)
        torch.testing.assert_close(out.to(dtype), known, atol=5e-3, rtol=3e-3)


@pytest.mark.parametrize("name", BINDING)
def test_packed_sequences_do_not_see_each_other(poisoned, name):
    check(BINDING[name])


def test_packed_sequences_with_a_window_have_a_forward_only():
    case = replace(PACKED, window=50)
    with pytest.raises(Refused, match="wrong dk for packed sequences with a window"):
        prepared(case, make_inputs(case, "cuda", 11, with_gradients=True))
    inputs = make_inputs(case, "cuda", 11, with_gradients=False)
    _, calls = prepared(case, inputs)
    assert inaccuracy({"out": expected(case, inputs, with_gradients=False).judge("out", calls.forward())}) is None


@pytest.mark.parametrize("api", ["binding", "wrapper"])
def test_calls_are_captured_in_a_cuda_graph_that_reads_its_inputs_anew(api):
    inputs = make_inputs(PLAIN, "cuda", 1, with_gradients=True)
    _, calls = prepared(PLAIN, inputs, api=api)
    run(calls)
    graph = torch.cuda.CUDAGraph()
    out = calls.forward()
    backward = calls.backward(out)
    backward()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = dict(zip(("out", "dq", "dk", "dv"), (calls.forward(), *backward()), strict=True))
    fresh = make_inputs(PLAIN, "cuda", 2, with_gradients=True)
    with torch.no_grad():
        for old, new in zip((*inputs.qkv, inputs.d_out_bhsd), (*fresh.qkv, fresh.d_out_bhsd), strict=True):
            old.copy_(new)
    graph.replay()
    known = expected(PLAIN, fresh, with_gradients=True)
    assert inaccuracy({name: known.judge(name, tensor) for name, tensor in found.items()}) is None


def test_a_deterministic_backward_repeats_to_the_bit_and_notes_what_it_takes():
    case = replace(PLAIN, q_len=2048, kv_len=2048, head_dim=128, value_dim=128, causal=False)
    inputs = make_inputs(case, "cuda", 1, with_gradients=True)
    taken = {}
    for deterministic in (False, True):
        _, calls = prepared(case, inputs, deterministic=deterministic)
        backward = calls.backward(calls.forward())
        first = [tensor.clone() for tensor in backward()]
        same = [torch.equal(one, other) for _ in range(5) for one, other in zip(first, backward(), strict=True)]
        assert all(same) or not deterministic
        assert min(calls.notes["forward_build_s"], calls.notes["backward_build_s"]) > 0
        taken[deterministic] = calls.notes["backward_workspace_bytes"]
    assert taken[True] != taken[False] > 0


def test_a_case_without_an_engine_is_refused_in_the_words_of_cudnn():
    more_queries = replace(PLAIN, q_len=400, kv_len=350, align="top_left", window=100)
    with pytest.raises(Refused, match="max_s_q <= max_s_kv"):
        prepared(more_queries, make_inputs(more_queries, "cuda", 1, with_gradients=True))
    one = replace(PLAIN, q_len=1, kv_len=1)
    _, calls = prepared(one, make_inputs(one, "cuda", 1, with_gradients=True))
    with pytest.raises(Refused, match="s_q = s_kv = 1"):
        calls.backward(calls.forward())


@pytest.mark.parametrize("options", [{}, {"api": "wrapper", "layout": "bshd"}, {"deterministic": True}])
def test_a_job_measures_it_by_the_kernels_that_it_claims(machine, options):
    request = make_request(CONFIG | options, PLAIN, timer="device", also=("kernel", "graph"), budget_s=0.02)
    record = measure(replace(request, device="cuda"), machine)
    assert record.status == "ok", record.reason
    for direction in ("forward", "backward"):
        assert [timing.timer for timing in record.passes[direction].timings][:3] == ["device", "kernel", "graph"]
        assert record.passes[direction].peak_memory_bytes > 0


def test_kernels_go_by_their_own_names_however_many_plans_came_and_went(machine):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("knows how Hopper's kernels are named")
    for deterministic in (False, True):
        for name, dim in (("full", 64), ("causal", 64), ("192 and 128", 192), ("256", 256), ("window", 64), ("40", 64)):
            case = replace(BOTH_APIS[name], q_len=1024, kv_len=1024)
            inputs = make_inputs(case, "cuda", 1, with_gradients=True)
            backend, calls = prepared(case, inputs, deterministic=deterministic)
            backward = calls.backward(calls.forward())
            for direction, call in (("forward", calls.forward), ("backward", backward)):
                call()
                claim = backend.claimed_kernels(direction, "cuda")
                kernels = [kernel.name for kernel in trace(machine.gpu, "cold", call, 2).kernels()]
                main = [kernel for kernel in kernels if re.search(claim, kernel)]
                assert [f"x{dim}_" in kernel for kernel in main] == [True], (name, direction, kernels)
