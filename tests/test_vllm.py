"""vLLM's FlashAttention 3, on a stand-in that computes what its documentation says."""

from dataclasses import replace

import pytest
import torch
from standins import install, packed, pieces, plain

from attn_exp.attention.error import inaccuracy
from attn_exp.attention.expected import expected
from attn_exp.attention.inputs import make_inputs
from attn_exp.backends.vllm import VllmFlash3
from attn_exp.core.case.case import Case

CASE = Case(
    batch=2, q_heads=4, kv_heads=2, q_len=12, kv_len=20, head_dim=64, value_dim=64, dtype="bfloat16", causal=True
)  # fmt: skip
PACKED = replace(CASE, batch=1, lengths=(3, 1, 8), q_len=12, kv_len=12)
LATENT = replace(CASE, q_heads=8, kv_heads=1, q_len=2, kv_len=40, head_dim=576, value_dim=512, latent=True)
CASES = [
    CASE,
    replace(CASE, causal=False, layout="bshd"),
    replace(CASE, window=5, softcap=2.0),
    replace(CASE, q_len=1, page_size=16, kv_len=50),
    replace(CASE, page_size=3, pages="shared", window=4),
    replace(PACKED, kv_lengths=(5, 7, 8), kv_len=20),
    replace(PACKED, kv_lengths=(5, 7, 8), kv_len=20, page_size=4),
    replace(CASE, sink=True, window=5),
    replace(PACKED, sink=True, kv_lengths=(5, 7, 8), kv_len=20, page_size=4),
    replace(PACKED, lengths=(3, 0, 9), kv_lengths=(5, 7, 9), kv_len=21, page_size=4),
    replace(PACKED, lengths=(0, 3, 0, 9)),
    LATENT,
    replace(LATENT, page_size=16, layout="bshd"),
]


@pytest.fixture
def planned(monkeypatch):
    """Install the stand-in; return the plans that were made."""
    plans = []

    def get_scheduler_metadata(
        batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens,
        qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, page_size=None, causal=False,
        window_size=(-1, -1), has_softcap=False,
    ):  # fmt: skip
        assert len(cache_seqlens) == batch_size and max(cache_seqlens) == max_seqlen_k
        plans.append((num_heads_q, num_heads_kv, headdim, headdim_v, page_size))
        return plans[-1]

    def flash_attn_varlen_func(
        q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None,
        softmax_scale=None, causal=False, window_size=None, softcap=0.0, block_table=None, scheduler_metadata=None,
        fa_version=2, s_aux=None,
    ):  # fmt: skip
        assert s_aux is None or (s_aux.dtype == torch.bfloat16 and s_aux.is_contiguous())
        assert fa_version == 3 and max_seqlen_q == cu_seqlens_q.diff().max()
        if q_v is not None:
            q, k = torch.cat((q_v, q), -1), torch.cat((v, k), -1)
        assert softmax_scale == q.shape[-1] ** -0.5
        left, right = window_size[0], 0 if causal else -1
        if block_table is None:
            return packed(q, k, v, cu_seqlens_q, max_seqlen_q, left, right, softcap, cu_seqlens_k, sinks=s_aux)
        assert scheduler_metadata == plans[-1] and cu_seqlens_k is None
        outs = []
        for some, pages, length in zip(pieces(cu_seqlens_q), block_table.tolist(), seqused_k.tolist(), strict=True):
            keys, values = (pool[pages].flatten(0, 1)[None, :length] for pool in (k, v))
            outs.append(plain(q[None, some], keys, values, left, right, softcap, sinks=s_aux)[0])
        return torch.cat(outs)

    members = {"flash_attn_varlen_func": flash_attn_varlen_func, "get_scheduler_metadata": get_scheduler_metadata}
    install(monkeypatch, "vllm.vllm_flash_attn", **members)
    return plans


@pytest.mark.parametrize("case", CASES, ids=Case.label)
def test_it_computes_what_a_case_says(case, planned):
    inputs = make_inputs(case, "cpu", 3, with_gradients=False)
    calls = VllmFlash3("vllm_fa3").prepare(case, inputs)
    right = expected(case, inputs, with_gradients=False)
    assert inaccuracy({"out": right.judge("out", calls.forward())}) is None
    key_dim = case.head_dim - case.value_dim if case.latent else case.head_dim
    plan = (case.q_heads, case.kv_heads, key_dim, case.value_dim, case.page_size)
    assert planned == ([] if case.page_size is None else [plan])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"latent": True}, "takes latent keys of 576 with values of 512 alone"),
        ({"head_dim": 576, "value_dim": 512}, "takes latent keys of 576 with values of 512 alone"),
    ],
)
def test_it_says_what_it_does_not_compute(changes, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    said = VllmFlash3("it").unsupported(replace(CASE, **changes), "cuda")
    assert said is None if words is None else words in said
