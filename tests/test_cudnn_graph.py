import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fake_cudnn import FakeCudnn, in_place_of_cudnn
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import cases

from attn_exp.attention.formula import hidden_keys
from attn_exp.attention.inputs import make_inputs
from attn_exp.backends.cudnn_graph import CudnnGraph
from attn_exp.backends.cudnn_plan import band_of, packed_operand
from attn_exp.backends.package import Refused, Unavailable
from attn_exp.core.case.case import Case

CASE = Case(
    batch=2, q_heads=4, kv_heads=2, q_len=24, kv_len=24, head_dim=16, value_dim=8, dtype="float16", causal=True
)  # fmt: skip
PACKED = replace(CASE, batch=1, q_len=16, kv_len=16, lengths=(5, 8, 3))


def seen_in(band, q_len, kv_len):
    """Which keys cuDNN says each query sees: `cudnn/sdpa/graph_analyzer.py` has a left bound L keep L keys."""
    if band is None:
        return torch.ones(q_len, kv_len, dtype=torch.bool)
    shift = kv_len - q_len if band.alignment == "BOTTOM_RIGHT" else 0
    own, key = torch.arange(q_len)[:, None] + shift, torch.arange(kv_len)[None, :]
    return (key <= own) & (key > own - (band.kept_keys or q_len + kv_len))


@given(cases())
def test_the_band_shows_the_keys_that_the_case_shows(case):
    # Bands are of windows, and every query sees a key.
    assume(case.keyless is None and case.prefix is None and case.chunk is None and case.block is None)
    hidden = hidden_keys(case, 0, case.q_len, torch.device("cpu"))
    band = band_of(case)
    assert torch.equal(seen_in(band, case.q_len, case.kv_len), ~hidden)
    # Without a band cuDNN has more kernels and faster ones.
    assert (band is None) == (not hidden.any())
    assert band is None or (case.offset == 0) == (band.alignment == "TOP_LEFT")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.sampled_from(["bhsd", "bshd"]))
def test_ragged_offsets_and_strides_find_every_number_of_packed_sequences(lengths, layout):
    total, heads, dim = sum(lengths), 3, 8
    case = replace(
        PACKED, q_heads=heads, kv_heads=heads, q_len=total, kv_len=total, lengths=tuple(lengths), layout=layout
    )
    q_bhsd = make_inputs(replace(case, head_dim=dim), "cpu", 1, with_gradients=True).q_bhsd
    told = packed_operand(q_bhsd, case.lengths)
    assert told.dims == (len(lengths), heads, max(lengths), dim)
    assert told.ragged_offsets.shape == (len(lengths) + 1, 1, 1, 1)
    assert not told.tensor.requires_grad
    start = 0
    for length, offset in zip(lengths, told.ragged_offsets.flatten().tolist(), strict=False):
        shown = torch.as_strided(told.tensor, (heads, length, dim), told.strides[1:], offset)
        assert torch.equal(shown, q_bhsd[0, :, start : start + length])
        start += length
    # One past the last sequence: where the tokens end.
    assert told.ragged_offsets.flatten()[-1] == total * told.strides[2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float32"}, "bfloat16 or float16"),
        ({"head_dim": 20}, "multiples of 8, not 20"),
        ({"value_dim": 12}, "multiples of 8, not 12"),
        ({"head_dim": 264, "value_dim": 264}, "up to 256"),
        ({"softcap": 30.0}, "softcap=null"),
        ({"q_len": 48}, "see no key"),
    ],
)
def test_a_case_that_cudnn_cannot_compute_is_refused_before_anything_is_built(monkeypatch, changes, words):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    made = CudnnGraph("cudnn_graph")
    assert made.unsupported(CASE, "cuda") is None
    assert words in (made.unsupported(replace(CASE, **changes), "cuda") or "")


def test_cpus_and_old_gpus_are_refused(monkeypatch):
    assert "runs only on NVIDIA GPUs" in CudnnGraph("cudnn_graph").unsupported(CASE, "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    refusal = CudnnGraph("cudnn_graph").unsupported(CASE, "cuda")
    assert "needs compute capability 8.0, this GPU has 7.5" in refusal


def test_the_wrapper_refuses_packed_sequences_and_says_what_to_set(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert CudnnGraph("c").unsupported(PACKED, "cuda") is None
    assert "set backend.api=binding" in CudnnGraph("c", api="wrapper").unsupported(PACKED, "cuda")


def test_gradients_of_packed_sequences_with_a_window_are_refused(fake):
    case = replace(PACKED, window=2)
    with pytest.raises(Refused, match=r"cuDNN 9\.19 .*this is 91900.*: set passes=\[forward\]"):
        CudnnGraph("c").prepare(case, make_inputs(case, "cpu", 1, with_gradients=True))
    assert not fake.graphs
    # A window that hides no key is none.
    for right, with_gradients in ((case, False), (PACKED, True), (replace(PACKED, window=8), True)):
        CudnnGraph("c").prepare(right, make_inputs(right, "cpu", 1, with_gradients=with_gradients))


def test_a_paged_cache_is_a_container_with_a_table_and_lengths(fake, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    case = replace(CASE, q_len=1, kv_len=50, causal=True, page_size=16)
    calls = CudnnGraph("c").prepare(case, make_inputs(case, "cpu", 1, with_gradients=False))
    pages = calls.inputs.paging.pages
    assert calls.forward().shape == (case.batch, case.q_heads, 1, case.value_dim)
    ((bound, *_),) = fake.runs
    shapes = [tuple(tensor.shape) for tensor in bound.values()]
    containers = [(pages.count, case.kv_heads, 16, dim) for dim in (case.head_dim, case.value_dim)]
    table, length = (case.batch, 1, 4, 1), (case.batch, 1, 1, 1)
    assert sorted(shapes) == sorted(
        [tuple(calls.inputs.q_bhsd.shape), *containers, table, table, length, length, tuple(calls.forward().shape)]
    )
    for refused in (CudnnGraph("c", api="wrapper").unsupported(case, "cuda"),
                    CudnnGraph("c").unsupported(replace(PACKED, page_size=16), "cuda")):  # fmt: skip
        assert "set lengths=null and backend.api=binding" in refused


def test_sinks_are_float32_arguments_whose_gradient_is_one_too(fake, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    case = replace(CASE, sink=True)
    inputs = make_inputs(case, "cpu", 1, with_gradients=True)
    made = CudnnGraph("c")
    assert made.unsupported(case, "cuda") is None
    calls = made.prepare(case, inputs)
    gradients = calls.backward(calls.forward())()
    forward, backward = (run[0] for run in fake.runs)
    of_node = [graph.node for graph in fake.graphs]
    sinks = forward[of_node[0]["sink_token"].uid]
    assert sinks.dtype == torch.float32 and torch.equal(sinks, inputs.sink.detach().float())
    assert torch.equal(backward[of_node[1]["sink_token"].uid], sinks)
    # What the library leaves in its own dtype is returned in the case's.
    written = backward[of_node[1]["dSink_token"].uid]
    written.copy_(torch.arange(4.0).reshape(1, 4, 1, 1))
    again = calls.backward(calls.forward())()
    assert written.dtype == torch.float32 and torch.equal(again[3].float(), written)
    assert [one.shape for one in gradients] == [leaf.shape for leaf in inputs.leaves]
    assert [one.dtype for one in gradients] == [leaf.dtype for leaf in inputs.leaves]


@pytest.mark.parametrize(
    ("api", "changes", "what"),
    [
        ("binding", {"q_len": 1}, "one query"),
        ("binding", {"batch": 1, "q_len": 16, "kv_len": 16, "lengths": (5, 8, 3)}, "packed sequences"),
        ("binding", {"dtype": "float8_e4m3fn"}, "fp8"),
        ("wrapper", {}, "cudnn.Graph"),
    ],
)
def test_sinks_that_cudnn_has_not_are_refused(api, changes, what, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    refused = CudnnGraph("c", api=api).unsupported(replace(CASE, sink=True, **changes), "cuda")
    assert refused == f"c has no sinks with {what}: set sink=false, or leave {what} out"


def test_a_missing_package_is_unavailable_with_the_command_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with pytest.raises(Unavailable, match=r"pip install 'attn_exp\[cudnn\]'"):
        CudnnGraph("c").prepare(CASE, make_inputs(CASE, "cpu", 1, with_gradients=False))


@pytest.fixture
def fake(monkeypatch):
    return in_place_of_cudnn(monkeypatch)


@pytest.mark.parametrize("api", ["binding", "wrapper"])
@pytest.mark.parametrize("layout", [None, "bhsd", "bshd"])
def test_every_call_runs_on_the_stream_of_the_moment_and_writes_into_the_same_tensors(fake, api, layout):
    inputs = make_inputs(CASE, "cpu", 1, with_gradients=True)
    calls = CudnnGraph("c", api=api, layout=layout).prepare(CASE, inputs)
    outs = [calls.forward(), calls.forward()]
    assert outs[0] is outs[1] and outs[0].shape == inputs.d_out_bhsd.shape
    call = calls.backward(outs[0])
    gradients = [call(), call()]
    assert all(one is other for one, other in zip(*gradients, strict=True))
    strides = [tensor.stride() for tensor in inputs.laid_out(layout or "bhsd").qkv]
    assert [gradient.stride() for gradient in gradients[0]] == strides
    assert [gradient.shape for gradient in gradients[0]] == [tensor.shape for tensor in inputs.qkv]
    assert [run[3] for run in fake.runs] == [100, 101, 102, 103]
    assert [run[1].numel() for run in fake.runs] == [4096] * 4
    assert {run[2] for run in fake.runs} == {"handle"}
    # Every tensor of the graphs is bound, and none that would drag autograd along.
    assert [len(run[0]) for run in fake.runs] == [5, 5, 9, 9]
    assert not any(tensor.requires_grad for run in fake.runs for tensor in run[0].values())
    names = {"forward_workspace_bytes", "forward_build_s", "backward_workspace_bytes", "backward_build_s"}
    assert set(calls.notes) == names and calls.notes["backward_workspace_bytes"] == 4096


@pytest.mark.parametrize("api", ["binding", "wrapper"])
@pytest.mark.parametrize(
    "complaint",
    [
        FakeCudnn.cudnnGraphNotSupportedError("[cudnn_frontend] Error: s_q = s_kv = 1\nis not supported."),
        RuntimeError("No valid engine configs for MATMUL_SOFTMAX_MATMUL"),
    ],
)
def test_a_graph_without_engine_is_refused_in_cudnn_s_words(fake, api, complaint):
    fake.complaint = complaint
    with pytest.raises(Refused, match=r"s_kv = 1 is not supported|No valid engine") as refused:
        CudnnGraph("c", api=api).prepare(CASE, make_inputs(CASE, "cpu", 1, with_gradients=False))
    assert "cudnn_frontend" not in str(refused.value)


def test_a_failure_is_no_refusal(fake):
    fake.complaint = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory"):
        CudnnGraph("c").prepare(CASE, make_inputs(CASE, "cpu", 1, with_gradients=False))


@pytest.mark.parametrize("api", ["binding", "wrapper"])
def test_a_kernel_of_the_front_end_s_own_is_not_passed_off_as_cudnn_s(fake, api):
    fake.engine = SimpleNamespace(name="sdpa_fwd_prefill_sm90")
    with pytest.raises(Refused, match="sdpa_fwd_prefill_sm90"):
        CudnnGraph("c", api=api).prepare(CASE, make_inputs(CASE, "cpu", 1, with_gradients=False))
