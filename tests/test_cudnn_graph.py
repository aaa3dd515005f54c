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
from attn_exp.backends.base import load_backend
from attn_exp.backends.cudnn_case import band_of, packed_operand
from attn_exp.backends.cudnn_graph import CudnnGraph, cudnn_refusal, dotted
from attn_exp.backends.package import Refused, Unavailable
from attn_exp.core.case import Case

CASE = Case(
    batch=2, q_heads=4, kv_heads=2, q_len=24, kv_len=24, head_dim=16, value_dim=8, dtype="float16", causal=True
)  # fmt: skip
PACKED = replace(CASE, batch=1, q_len=16, kv_len=16, lengths=(5, 8, 3))
TARGET = "attn_exp.backends.cudnn_graph.CudnnGraph"


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
    assume(case.keyless is None and case.prefix is None and case.chunk is None)
    hidden = hidden_keys(case, 0, case.q_len, torch.device("cpu"))
    band = band_of(case)
    assert torch.equal(seen_in(band, case.q_len, case.kv_len), ~hidden)
    # Without a band cuDNN has more kernels and faster ones.
    assert (band is None) == (not hidden.any())
    assert band is None or (case.offset == 0) == (band.alignment == "TOP_LEFT")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.none() | st.integers(1, 9))
def test_packed_sequences_have_the_band_of_each_of_them(lengths, window):
    case = replace(PACKED, q_len=sum(lengths), kv_len=sum(lengths), lengths=tuple(lengths), window=window)
    hidden, band, start = hidden_keys(case, 0, case.q_len, torch.device("cpu")), band_of(case), 0
    for length in lengths:
        own = slice(start, start + length)
        assert torch.equal(seen_in(band, length, length), ~hidden[own, own])
        start += length


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
    ("options", "words"),
    [
        ({"api": "graph"}, "binding, wrapper"),
        ({"layout": "sbhd"}, "bhsd, bshd, or null"),
        ({"deterministic": "yes"}, "neither true nor false"),
        ({"stats": True}, "stats"),
    ],
)
def test_options_that_are_wrong_say_what_there_is(options, words):
    with pytest.raises(Unavailable, match=words):
        load_backend({"_target_": TARGET, "name": "cudnn_graph"} | options)


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
def test_what_cudnn_cannot_compute_is_refused_before_anything_is_built(monkeypatch, changes, words):
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


def test_a_missing_package_is_unavailable_with_the_command_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with pytest.raises(Unavailable, match=r"pip install 'attn_exp\[cudnn\]'"):
        CudnnGraph("c").prepare(CASE, make_inputs(CASE, "cpu", 1, with_gradients=False))


@pytest.mark.parametrize(
    ("number", "words"), [(8903, "8.9.3"), (90_000, "9.0.0"), (91_900, "9.19.0"), (91_002, "9.10.2")]
)
def test_version_numbers_are_read_as_cudnn_writes_them(number, words):
    assert dotted(number) == words


def test_an_old_cudnn_is_unavailable_and_says_what_it_needs(monkeypatch):
    assert cudnn_refusal(8903, "binding") is None
    assert "needs cuDNN 8.9.3, here is 8.9.2" in cudnn_refusal(8902, "binding")
    assert "needs cuDNN 9.12.0, here is 9.11.0" in cudnn_refusal(91_100, "wrapper")
    inputs = make_inputs(CASE, "cpu", 1, with_gradients=False)
    monkeypatch.setitem(sys.modules, "cudnn", FakeCudnn(version=8902))
    with pytest.raises(Unavailable, match=r"8\.9\.3"):
        CudnnGraph("c").prepare(CASE, inputs)
    monkeypatch.setitem(sys.modules, "cudnn", FakeCudnn(version=None))
    with pytest.raises(Unavailable, match="libcudnn was not found"):
        CudnnGraph("c").prepare(CASE, inputs)


@pytest.fixture
def fake(monkeypatch):
    return in_place_of_cudnn(monkeypatch)


def test_the_graph_is_built_in_order_and_python_engines_are_barred(fake):
    CudnnGraph("c").prepare(CASE, make_inputs(CASE, "cpu", 1, with_gradients=False))
    steps = ["validate", "build_operation_graph", "create_execution_plans", "deselect_engines", "check_support"]
    assert fake.graphs[0].steps == [*steps, "build_plans"]


@pytest.mark.parametrize("api", ["binding", "wrapper"])
def test_statistics_are_made_only_if_gradients_are_wanted(fake, api):
    for with_gradients in (False, True):
        inputs = make_inputs(CASE, "cpu", 1, with_gradients=with_gradients)
        CudnnGraph("c", api=api).prepare(CASE, inputs).forward()
        assert fake.graphs[-1].node["generate_stats"] is with_gradients
        buffers = fake.runs[-1][0]
        stats = [tensor for tensor in buffers.values() if tensor.dtype == torch.float32]
        assert [tuple(tensor.shape) for tensor in stats] == [(2, 4, 24, 1)] * with_gradients


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


def test_outputs_are_declared_as_their_tensors_lie(fake):
    calls = CudnnGraph("c", layout="bshd").prepare(CASE, make_inputs(CASE, "cpu", 1, with_gradients=True))
    out = calls.forward()
    graph, buffers = fake.graphs[0], fake.runs[0][0]
    for uid, tensor in buffers.items():
        told = graph.tensors[uid].told
        assert (tuple(told["dim"]), tuple(told["stride"])) == (tuple(tensor.shape), tensor.stride())
    assert out.stride() == (24 * 4 * 8, 8, 4 * 8, 1)


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"causal": False}, {}),
        ({}, {"diagonal_alignment": "top left", "diagonal_band_right_bound": 0}),
        (
            {"q_len": 10, "window": 7},
            {"diagonal_alignment": "bottom right", "diagonal_band_right_bound": 0, "diagonal_band_left_bound": 7},
        ),
    ],
)
def test_the_node_is_told_of_scale_and_mask(fake, changes, options):
    case = replace(CASE, **changes)
    calls = CudnnGraph("c", deterministic=True).prepare(case, make_inputs(case, "cpu", 1, with_gradients=True))
    calls.backward(calls.forward())
    forward, backward = ({name: graph.node.get(name) for name in graph.node} for graph in fake.graphs)
    wanted = {"attn_scale": 0.25, **options}
    assert {name: forward[name] for name in forward if name not in ("name", "q", "k", "v", "generate_stats")} == wanted
    tensors = ("name", "q", "k", "v", "o", "dO", "stats")
    assert {name: backward[name] for name in backward if name not in tensors} == {
        **wanted,
        "use_deterministic_algorithm": True,
    }


def test_packed_sequences_are_told_of_with_lengths_and_ragged_offsets(fake):
    inputs = make_inputs(PACKED, "cpu", 1, with_gradients=True)
    calls = CudnnGraph("c").prepare(PACKED, inputs)
    calls.backward(calls.forward())()
    for graph, (buffers, *_), ragged in zip(fake.graphs, fake.runs, ("qkv", ("q", "k", "v", "o", "dO")), strict=True):
        assert graph.node["use_padding_mask"] is True
        lengths = buffers[graph.node["seq_len_kv"].get_uid()]
        assert lengths.flatten().tolist() == [5, 8, 3] and lengths.dtype == torch.int32
        for name in ragged:
            offsets = buffers[graph.node[name].told["ragged_offset"].get_uid()]
            assert offsets.numel() == 4
        # The outputs as well, else they would be written as if padded.
        written = [tensor for tensor in graph.tensors.values() if "output" in tensor.told]
        assert sum("ragged_offset" in tensor.told for tensor in written) == (1 if ragged == "qkv" else 3)
    assert fake.graphs[1].node["max_total_seq_len_q"] == 16


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


def test_what_breaks_is_no_refusal(fake):
    fake.complaint = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory"):
        CudnnGraph("c").prepare(CASE, make_inputs(CASE, "cpu", 1, with_gradients=False))


@pytest.mark.parametrize("api", ["binding", "wrapper"])
def test_a_kernel_of_the_front_end_s_own_is_not_passed_off_as_cudnn_s(fake, api):
    fake.engine = SimpleNamespace(name="sdpa_fwd_prefill_sm90")
    with pytest.raises(Refused, match="sdpa_fwd_prefill_sm90"):
        CudnnGraph("c", api=api).prepare(CASE, make_inputs(CASE, "cpu", 1, with_gradients=False))
