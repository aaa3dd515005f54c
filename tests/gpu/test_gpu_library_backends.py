"""Backends of other libraries on a GPU, each where its package is installed."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
import yaml

import attn_exp
from attn_exp.attention.error import inaccuracy
from attn_exp.attention.expected import expected
from attn_exp.attention.fused_formula import int8_formula
from attn_exp.attention.hard_values import make_inputs_of
from attn_exp.attention.inputs import make_inputs
from attn_exp.attention.verdict import verdict
from attn_exp.backends.base import load_backend, supported_passes
from attn_exp.backends.package import Refused, Unavailable
from attn_exp.core.case.case import HALVES, INT8, Case
from attn_exp.timers.trace import activities

pytestmark = pytest.mark.gpu

CONF = Path(attn_exp.__file__).parent.parent / "conf"
NAMES = ("fa2", "fa3", "fa4", "xformers_cutlass", "xformers_fa3", "te", "helion", "varlen", "flashmla")
NAMES += ("vllm_fa3", "vllm_flashmla", "cudnn_graph")
CASE = Case(
    batch=2, q_heads=8, kv_heads=8, q_len=1024, kv_len=1024, head_dim=128, value_dim=128, dtype="bfloat16"
)  # fmt: skip
PACKED = replace(CASE, batch=1, lengths=(300, 1, 211, 512))
CASES = [
    CASE,
    replace(CASE, causal=True),
    replace(CASE, causal=True, q_len=777, kv_len=777, layout="bshd"),
    replace(CASE, causal=True, q_len=500, kv_len=1111),
    replace(CASE, causal=True, q_len=500, kv_len=1111, align="top_left"),
    replace(CASE, causal=True, window=200),
    replace(CASE, causal=True, window=129, q_len=700, kv_len=1000),
    replace(CASE, causal=True, window=1),
    replace(CASE, causal=True, kv_heads=2),
    replace(CASE, kv_heads=1),
    replace(CASE, causal=True, softcap=5.0),
    replace(CASE, causal=True, head_dim=64, value_dim=64),
    replace(CASE, causal=True, head_dim=64, value_dim=64, kv_heads=2, softcap=3.0, window=77),
    replace(CASE, head_dim=64, value_dim=64, dtype="float16"),
    replace(CASE, causal=True, head_dim=96, value_dim=96),
    replace(CASE, causal=True, head_dim=192, value_dim=128),
    replace(CASE, causal=True, head_dim=256, value_dim=256),
    replace(CASE, causal=True, q_len=1, kv_len=4096),
    replace(CASE, causal=True, q_len=1, kv_len=4096, kv_heads=2, batch=8),
    PACKED,
    replace(PACKED, causal=True),
    replace(PACKED, causal=True, window=100, kv_heads=2),
    replace(CASE, dtype="float32", q_len=200),
]
REQUESTS = replace(CASE, batch=1, q_len=602, kv_len=3900, lengths=(1, 300, 1, 300), kv_lengths=(2000, 300, 600, 1000))
CASES += [replace(REQUESTS, causal=True), replace(REQUESTS, causal=True, kv_heads=2, window=200), REQUESTS]
# Latent keys: DeepSeek-V3's in decoding, for FlashMLA, and small ones for kernels that take values as a view of keys.
LATENT = replace(
    CASE, causal=True, q_heads=128, kv_heads=1, q_len=1, kv_len=4096, head_dim=576, value_dim=512, latent=True
)
SMALL_LATENT = replace(LATENT, q_heads=16, head_dim=192, value_dim=128)
CASES += [LATENT, replace(LATENT, q_len=2, kv_len=1088, dtype="float16"), replace(LATENT, batch=8, q_heads=16)]
CASES += [replace(LATENT, page_size=64, kv_len=1000)]
CASES += [replace(CASE, causal=True, q_len=1, kv_len=3000, kv_heads=2, page_size=size) for size in (16, 256)]
# Caches of a server: pages of one key, shared ones, codes, more queries than one, requests of different lengths.
PAGED = replace(CASE, batch=3, causal=True, q_heads=32, q_len=1, kv_len=5001, page_size=16)
CACHES = [
    PAGED,
    replace(PAGED, kv_heads=32, page_size=1),
    replace(PAGED, pages="shared", page_size=64),
    replace(PAGED, pages="linear", q_len=7, dtype="float16"),
    replace(PAGED, cache_dtype="fp8", page_size=64),
    replace(REQUESTS, causal=True, kv_heads=2, page_size=64),
    replace(LATENT, batch=3, page_size=16, kv_len=5001),
    replace(LATENT, batch=3, page_size=64, kv_len=5001, pages="shared", q_len=2),
]
CASES += CACHES
# Each combination of dtypes, dimensions and masks takes FlashInfer half a minute of nvcc.
FLASHINFER = [PACKED, replace(CASE, causal=True), *CACHES]
FLASHINFER += [replace(CASE, causal=True, q_len=1, kv_len=4096, kv_heads=heads) for heads in (2, 8)]
# Masks and sinks that backends of ours and of PyTorch take as data or as a function.
MASKS = [
    replace(CASE, sink=True),
    replace(CASE, sink=True, causal=True, kv_heads=2, softcap=5.0),
    replace(CASE, sink=True, causal=True, q_len=500, kv_len=1111, dtype="float16", head_dim=64, value_dim=64),
    replace(CASE, sink=True, causal=True, window=128, q_heads=64, head_dim=64, value_dim=64, q_len=4096, kv_len=4096),
    replace(PACKED, sink=True, causal=True),
    replace(CASE, sink=True, q_len=1, kv_len=4096, kv_heads=2),
    replace(CASE, alibi=True, causal=True),
    replace(CASE, alibi=True, causal=True, kv_heads=2, softcap=5.0, q_len=500, kv_len=1111, dtype="float16"),
    replace(PACKED, alibi=True, causal=True),
    replace(CASE, bias="heads", causal=True),
    replace(CASE, bias="heads", kv_heads=2, q_len=500, kv_len=1111, dtype="float16", head_dim=64, value_dim=64),
    replace(CASE, bias="shared", alibi=True, sink=True, causal=True, window=128),
    replace(CASE, causal=True, prefix=300),
    replace(CASE, causal=True, prefix=77, q_len=500, kv_len=1111, kv_heads=2),
    replace(CASE, causal=True, prefix=900, q_len=1111, kv_len=500, head_dim=64, value_dim=64),
    replace(CASE, causal=True, block=256),
    replace(CASE, causal=True, block=100, q_len=500, kv_len=1111, dtype="float16"),
    replace(CASE, causal=True, chunk=256),
    replace(CASE, causal=True, chunk=100, q_len=500, kv_len=1111, dtype="float16"),
    replace(CASE, causal=True, chunk=64, head_dim=64, value_dim=64, kv_heads=1, softcap=5.0),
    PACKED,
    replace(PACKED, causal=True, kv_heads=2),
    replace(PACKED, causal=True, window=100),
    replace(PACKED, causal=True, prefix=50, head_dim=192),
    replace(PACKED, causal=True, chunk=90, head_dim=64, value_dim=64),
    replace(PACKED, causal=True, block=90, head_dim=64, value_dim=64),
    replace(REQUESTS, causal=True),
    replace(REQUESTS, causal=True, kv_heads=2, window=200),
    replace(CASE, causal=True, window=200, kv_heads=2),
    replace(CASE, causal=True, q_len=1, kv_len=4096),
    LATENT,
    SMALL_LATENT,
    replace(SMALL_LATENT, q_len=300, kv_len=1111, dtype="float16", layout="bshd"),
    replace(CASE, causal=True, q_len=1, kv_len=4096, kv_heads=2, page_size=16),
    replace(CASE, causal=True, q_len=300, kv_len=1111, kv_heads=1, page_size=1, dtype="float16"),
    replace(REQUESTS, causal=True, kv_heads=2, page_size=64),
    replace(SMALL_LATENT, page_size=64),
    *CACHES,
]
# Sinks of libraries, and requests without a query.
WITH_SINKS = [
    replace(CASE, sink=True, causal=True, kv_heads=2),
    replace(CASE, sink=True, causal=True, window=128, q_heads=64, kv_heads=8, head_dim=64, value_dim=64),
    replace(PAGED, sink=True),
]
IDLE = replace(
    CASE, batch=1, causal=True, kv_heads=2, q_len=301, kv_len=3300, lengths=(1, 0, 300), kv_lengths=(2000, 0, 1300)
)
EMPTY = [IDLE, replace(IDLE, page_size=16)]
# SDPA takes what is added to scores as a tensor; cuDNN through SDPA and `flash` may refuse it.
BIASES = [
    *itertools.product(
        ("auto", "math", "efficient", "cudnn"),
        [replace(CASE, alibi=True, causal=True), replace(CASE, bias="heads", q_len=500, kv_len=1111)],
    )
]


def configured(name, **options):
    return load_backend(yaml.safe_load((CONF / f"backend/{name}.yaml").read_text()) | options)


def prepared(backend, case):
    """Inputs and calls; skipped where the case is refused or the package missing."""
    reason = backend.unsupported(case, "cuda")
    if reason:
        pytest.skip(reason)
    both = supported_passes(backend, case) == HALVES
    inputs = make_inputs(case, "cuda", torch.seed() % 2**31, with_gradients=both)
    try:
        return inputs, backend.prepare(case, inputs)
    except (Unavailable, Refused) as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *itertools.product(NAMES, CASES),
        *itertools.product(("flashinfer",), FLASHINFER),
        *itertools.product(("triton", "flex", "eager"), MASKS),
        *BIASES,
        *itertools.product(("fa4", "flashinfer", "vllm_fa3", "cudnn_graph"), WITH_SINKS),
        *itertools.product(("triton", "flex", "fa4", "flashinfer", "vllm_fa3"), EMPTY),
    ],
    ids=lambda value: value.label() if isinstance(value, Case) else value,
)
def test_it_is_right_and_runs_the_kernels_that_it_claims(name, case):
    backend = configured(name)
    inputs, calls = prepared(backend, case)
    both = supported_passes(backend, case) == HALVES
    right = expected(case, inputs, with_gradients=both)
    with calls.scope():
        out = calls.forward()
        found, timed = {"out": out.detach()}, {"forward": calls.forward}
        if both:
            timed["backward"] = calls.backward(out)
            found |= dict(zip(inputs.gradient_names, timed["backward"](), strict=True))
        assert inaccuracy({name: right.judge(name, tensor) for name, tensor in found.items()}) is None
        for direction, call in timed.items():
            ran, claimed = [activity.name for activity in activities(call)], backend.claimed_kernels(direction, "cuda")
            # `auto` claims none: the choice is PyTorch's.
            assert ran and (claimed is None or any(re.search(claimed, kernel) for kernel in ran)), ran


@pytest.mark.parametrize("name", ["fa2", "fa3", "fa4"])
def test_the_deterministic_backward_gives_the_same_bits_each_time(name):
    case = replace(CASE, batch=1, causal=True, q_len=4096, kv_len=4096)
    _, calls = prepared(configured(name, deterministic=True), case)
    with calls.scope():
        backward = calls.backward(calls.forward())
        first = backward()
        for _ in range(3):
            assert all(torch.equal(one, other) for one, other in zip(first, backward(), strict=True))


INT8_CASES = [
    replace(CASE, dtype=INT8),
    replace(CASE, dtype=INT8, causal=True, layout="bshd"),
    replace(CASE, dtype=INT8, causal=True, q_len=777, kv_len=777, kv_heads=2),
    replace(CASE, dtype=INT8, q_len=500, kv_len=1088, head_dim=64, value_dim=64),
    replace(CASE, dtype=INT8, causal=True, head_dim=96, value_dim=96),
    replace(CASE, dtype=INT8, causal=True, q_len=1, kv_len=4096, batch=8),
]


@pytest.mark.parametrize("kind", ["normal", "mixed", "outliers"])
@pytest.mark.parametrize("case", INT8_CASES, ids=Case.label)
def test_sage_is_right_but_for_its_codes_and_leaves_its_inputs(case, kind):
    pytest.importorskip("sageattention")
    backend = configured("sage")
    assert backend.unsupported(case, "cuda") is None
    inputs = make_inputs_of(kind, case, "cuda", torch.seed() % 2**31, with_gradients=False)
    before = [tensor.clone() for tensor in inputs.qkv]
    calls = backend.prepare(case, inputs)
    out = calls.forward()
    assert verdict(case, inputs, expected(case, inputs, with_gradients=False), {"out": out}, {}).wrong is None
    # The kernels are those of the formula, but for ties and the order of sums.
    assert (out - int8_formula(case, inputs)).norm() < 0.005 * out.norm()
    assert all(torch.equal(now, then) for now, then in zip(inputs.qkv, before, strict=True))
    ran = [activity.name for activity in activities(calls.forward)]
    assert any(re.search(backend.claimed_kernels("forward", "cuda"), kernel) for kernel in ran), ran


@pytest.mark.parametrize("name", ["fa3", "xformers_fa3"])
def test_the_operator_passes_opcheck_and_compiled_whole_it_is_one_graph_with_the_same_gradients(name):
    inputs, calls = prepared(configured(name), replace(CASE, causal=True))
    operator = getattr(torch.ops.attn_exp, f"{name}_attention").default
    bshd = [tensor.detach().transpose(1, 2).requires_grad_() for tensor in inputs.qkv]
    checked = torch.library.opcheck(operator, (*bshd, None, [], True, None, None, False))
    assert set(checked.values()) == {"SUCCESS"}
    inputs = inputs.laid_out("bshd")
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    out = torch.compile(calls.attention, fullgraph=True, backend=counter)(*inputs.qkv)
    assert counter.frame_count == 1
    assert torch.equal(out, calls.forward())
    plain = torch.autograd.grad(calls.attention(*inputs.qkv), inputs.qkv, inputs.d_out_bhsd)
    whole = torch.autograd.grad(out, inputs.qkv, inputs.d_out_bhsd)
    for one, other in zip(whole, plain, strict=True):
        # dq is a sum in an order that is not fixed.
        assert (one - other).norm() < 1e-3 * other.norm()
