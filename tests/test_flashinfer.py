"""FlashInfer's wrappers, on stand-ins that compute what their documentation says."""

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
    replace(CASE, page_size=16, kv_len=50),
    replace(CASE, page_size=3, pages="shared", cache_dtype="fp8"),
    replace(CASE, q_len=1, page_size=16, kv_len=50, window=7),
    replace(CASE, q_len=1, kv_len=192, q_heads=8, softcap=2.0),
    replace(CASE, q_len=1, page_size=1, cache_dtype="fp8", layout="bshd"),
    replace(PACKED, kv_lengths=(5, 7, 8), kv_len=20, page_size=4),
    replace(PACKED, lengths=(3, 0, 9), kv_lengths=(5, 0, 15), kv_len=20, page_size=4),
    replace(PACKED, lengths=(0, 3, 0, 9)),
    replace(CASE, sink=True, window=5),
    replace(CASE, sink=True, q_len=1, page_size=16, kv_len=50),
    replace(PACKED, sink=True, kv_lengths=(5, 7, 8), kv_len=20, page_size=4),
]
LATENT = replace(CASE, q_heads=8, kv_heads=1, q_len=1, kv_len=40, head_dim=576, value_dim=512, latent=True)
CASES += [LATENT, replace(LATENT, q_len=3, page_size=16), replace(LATENT, layout="bshd", page_size=1, pages="shared")]


@pytest.fixture
def planned(monkeypatch):
    """Install the stand-in; return what each wrapper was made and planned with."""
    known = []

    class Wrapper:
        def __init__(self, float_workspace_buffer, kv_layout="NHD", backend="auto", use_tensor_cores=None):
            assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"
            self.tensor_cores = use_tensor_cores
            self.made = SimpleNamespace(backend=backend)
            known.append(self.made)

        def of_requests(self, q, keys, values, options, **sinks):
            outs = [
                plain(q[None, some], k[None].to(q.dtype), v[None].to(q.dtype), *options, **sinks)[0]
                for some, k, v in zip(self.of_queries, keys, values, strict=True)
            ]
            return torch.cat(outs)

    class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
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
            return self.of_requests(q, *([rows[keys] for keys in self.of_keys] for rows in (k, v)), self.options)

    class Paged(Wrapper):
        def lie(self, indptr, indices, last_page_len, page_size):
            assert indptr.device.type == last_page_len.device.type == "cpu"
            assert {tensor.dtype for tensor in (indptr, indices, last_page_len)} == {torch.int32}
            self.page_size, self.lasts = page_size, last_page_len.tolist()
            self.pages = [indices[some] for some in pieces(indptr)]

        def gathered(self, pool, scale):
            assert pool.shape[1] == self.page_size
            for pages, last in zip(self.pages, self.lasts, strict=True):
                # Without a page `get_length` is 0, whatever its last page has.
                rows = torch.cat([pool[page].float() for page in pages] or [pool[0, :0].float()]) * scale
                yield rows[: max(0, len(pages) - 1) * self.page_size + last]

        def run(self, q, paged_kv_cache, k_scale=1.0, v_scale=1.0):
            k, v = paged_kv_cache
            assert (q.dtype, k.dtype) == self.dtypes
            return self.of_requests(q, self.gathered(k, k_scale), self.gathered(v, v_scale), self.options)

    class BatchPrefillWithPagedKVCacheWrapper(Paged):
        def plan(
            self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
            head_dim_qk, page_size, head_dim_vo=None, causal=False, sm_scale=None, window_left=-1,
            logits_soft_cap=None, q_data_type="float16", kv_data_type=None,
        ):  # fmt: skip
            self.lie(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
            self.of_queries, self.dtypes = pieces(qo_indptr), (q_data_type, kv_data_type)
            self.options = (window_left, 0 if causal else -1, logits_soft_cap or 0.0)

    class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
        def __init__(
            self, float_workspace_buffer, kv_layout, *, backend, q_data_type, kv_data_type, head_dim_qk, head_dim_vo,
            window_left,
        ):  # fmt: skip
            super().__init__(float_workspace_buffer, kv_layout, backend)
            self.built = (q_data_type, kv_data_type, head_dim_qk, head_dim_vo, window_left)

        def run(self, q, paged_kv_cache, sink, sm_scale):
            k, v = paged_kv_cache
            assert self.built == (*self.dtypes, q.shape[-1], v.shape[-1], self.options[0])
            assert sink.dtype == torch.float32 and sm_scale == q.shape[-1] ** -0.5
            return self.of_requests(q, self.gathered(k, 1.0), self.gathered(v, 1.0), self.options, sinks=sink)

    class BatchDecodeWithPagedKVCacheWrapper(Paged):
        def plan(
            self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *, window_left=-1,
            logits_soft_cap=None, q_data_type="float16", kv_data_type=None, sm_scale=None,
        ):  # fmt: skip
            assert self.tensor_cores == (num_qo_heads // num_kv_heads >= 4)
            self.lie(indptr, indices, last_page_len, page_size)
            self.of_queries, self.dtypes = (
                [slice(i, i + 1) for i in range(len(indptr) - 1)],
                (q_data_type, kv_data_type),
            )
            self.options = (window_left, -1, logits_soft_cap or 0.0)

    class BatchMLAPagedAttentionWrapper(Paged):
        def plan(
            self, *, metadata, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale, q_data_type,
            kv_data_type,
        ):  # fmt: skip
            assert (head_dim_ckv, head_dim_kpe, sm_scale) == (512, 64, 576**-0.5)
            qo_indptr, kv_indptr, kv_indices, kv_len_arr = metadata
            self.lie(kv_indptr, kv_indices, (kv_len_arr - 1) % page_size + 1, page_size)
            self.of_queries, self.options = pieces(qo_indptr), (-1, 0 if causal else -1)

        def run(self, *, query, kv_cache):
            keys = list(self.gathered(kv_cache[:, :, None], 1.0))
            return self.of_requests(query, keys, [rows[..., :512] for rows in keys], self.options)

    wrappers = (
        BatchPrefillWithRaggedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper, BatchDecodeWithPagedKVCacheWrapper,
        BatchAttentionWithAttentionSinkWrapper,
    )  # fmt: skip
    install(monkeypatch, "flashinfer", **{wrapper.__name__: wrapper for wrapper in wrappers})
    plans = SimpleNamespace(csr=lambda *tensors: tensors)
    install(monkeypatch, "flashinfer.mla", BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper,
            MLAPlanMetadata=plans)  # fmt: skip
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
        ({"head_dim": 576, "value_dim": 512}, "auto", (9, 0), "takes latent keys of 576 with values of 512 alone"),
        ({"latent": True}, "auto", (9, 0), "takes latent keys of 576 with values of 512 alone"),
        ({"head_dim": 576, "value_dim": 512, "latent": True}, "auto", (9, 0), None),
        ({"head_dim": 576, "value_dim": 512, "latent": True, "window": 5}, "auto", (9, 0), "set window=null"),
    ],
)
def test_it_says_what_it_does_not_compute(changes, kernel, capability, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    said = FlashInfer("it", kernel=kernel).unsupported(replace(CASE, **changes), "cuda")
    assert said is None if words is None else words in said
    assert supported_passes(FlashInfer("it"), CASE) == ("forward",)
