"""FlashInfer's wrapper, on a stand-in that computes what its documentation says."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from standins import install, pieces, plain

from attn_exp.attention.error import inaccuracy
from attn_exp.attention.expected import expected
from attn_exp.attention.inputs import make_inputs
from attn_exp.backends import flashinfer
from attn_exp.backends.base import load_backend, supported_passes
from attn_exp.backends.flashinfer import FlashInfer
from attn_exp.backends.package import Unavailable
from attn_exp.core.case.case import Case

CASE = Case(
    batch=2, q_heads=4, kv_heads=2, q_len=12, kv_len=20, head_dim=64, value_dim=64, dtype="bfloat16", causal=True
)  # fmt: skip
PACKED = replace(CASE, batch=1, lengths=(3, 1, 8), q_len=12, kv_len=12)
CASES = [
    CASE,
    replace(CASE, causal=False),
    replace(CASE, window=5, layout="bshd"),
    replace(CASE, window=1),
    replace(CASE, softcap=2.0, dtype="float16"),
    replace(CASE, q_len=1),
    PACKED,
    replace(PACKED, kv_lengths=(5, 7, 8), kv_len=20, window=4),
]


@pytest.fixture
def planned(monkeypatch):
    """Install the stand-in; return what each wrapper was made and planned with."""
    known = []

    class BatchPrefillWithRaggedKVCacheWrapper:
        def __init__(self, float_workspace_buffer, kv_layout="NHD", backend="auto"):
            assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"
            self.made = SimpleNamespace(backend=backend)
            known.append(self.made)

        def plan(
            self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, *, causal=False,
            window_left=-1, logits_soft_cap=None, sm_scale=None, q_data_type="float16",
        ):  # fmt: skip
            assert qo_indptr.dtype == kv_indptr.dtype == torch.int32 and qo_indptr.device.type == "cpu"
            assert sm_scale == head_dim_qk**-0.5
            self.of_queries, self.of_keys = pieces(qo_indptr), pieces(kv_indptr)
            self.shapes = (num_qo_heads, head_dim_qk), (num_kv_heads, head_dim_qk), (num_kv_heads, head_dim_vo)
            self.options, self.dtype = (window_left, 0 if causal else -1, logits_soft_cap or 0.0), q_data_type

        def run(self, q, k, v):
            assert q.dtype == self.dtype and tuple(tensor.shape[1:] for tensor in (q, k, v)) == self.shapes
            assert len(q) == self.of_queries[-1].stop and len(k) == self.of_keys[-1].stop
            outs = [
                plain(q[None, some], k[None, keys], v[None, keys], *self.options)[0]
                for some, keys in zip(self.of_queries, self.of_keys, strict=True)
            ]
            return torch.cat(outs)

    install(monkeypatch, "flashinfer",
            BatchPrefillWithRaggedKVCacheWrapper=BatchPrefillWithRaggedKVCacheWrapper)  # fmt: skip
    monkeypatch.setattr(flashinfer, "_WORKSPACE_BYTES", 1 << 10)
    return known


@pytest.mark.parametrize("case", CASES, ids=Case.label)
def test_it_computes_what_a_case_says(case, planned):
    inputs = make_inputs(case, "cpu", 3, with_gradients=False)
    calls = FlashInfer("flashinfer").prepare(case, inputs)
    right = expected(case, inputs, with_gradients=False)
    assert inaccuracy({"out": right.judge("out", calls.forward())}) is None
    assert calls.notes == {"forward_workspace_bytes": 1024} and planned[0].backend == "auto"


def test_a_kernel_is_forced_and_an_unknown_one_is_a_mistake_of_the_users(planned):
    FlashInfer("flashinfer", kernel="fa2").prepare(CASE, make_inputs(CASE, "cpu", 3, with_gradients=False))
    assert planned[0].backend == "fa2"
    with pytest.raises(Unavailable, match="kernel='cudnn' is not one of auto, fa2, fa3"):
        load_backend({"_target_": "attn_exp.backends.flashinfer.FlashInfer", "name": "it", "kernel": "cudnn"})


@pytest.mark.parametrize(
    ("changes", "kernel", "capability", "words"),
    [
        ({}, "auto", (8, 0), None),
        ({}, "fa3", (8, 0), "has kernel=fa3 only on compute capability 9.0"),
        ({}, "fa3", (9, 0), None),
        ({"head_dim": 192, "value_dim": 128}, "auto", (9, 0), None),
        ({"head_dim": 192, "value_dim": 192}, "auto", (9, 0), "192 only with values of 128"),
        ({"head_dim": 96, "value_dim": 96}, "auto", (9, 0), "has head dimensions 64 or 128 or 192 or 256, not 96"),
        ({"align": "top_left"}, "auto", (9, 0), "set align=bottom_right"),
        ({"chunk": 4}, "auto", (9, 0), "has no chunks"),
        ({"dtype": "float32"}, "auto", (9, 0), "computes bfloat16 or float16"),
    ],
)
def test_it_says_what_it_does_not_compute(changes, kernel, capability, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    said = FlashInfer("it", kernel=kernel).unsupported(replace(CASE, **changes), "cuda")
    assert said is None if words is None else words in said
    assert supported_passes(FlashInfer("it"), CASE) == ("forward",)
