import re
from dataclasses import replace

import pytest
import torch
from fakes import CASE, make_request
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from strategies import NUMBER_DTYPES, cases, packed_cases
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_exp.attention import reference as reference_module
from attn_exp.attention.error import inaccuracy
from attn_exp.attention.expected import expected
from attn_exp.attention.inputs import Inputs, make_inputs
from attn_exp.attention.reference import reference
from attn_exp.backends import sdpa
from attn_exp.backends.base import load_backend
from attn_exp.backends.eager import Eager
from attn_exp.backends.package import Unavailable
from attn_exp.backends.reference import Reference
from attn_exp.backends.sdpa import Cudnn, Efficient, Flash, Math, Sdpa
from attn_exp.backends.supports import Supports
from attn_exp.core.case.case import Case
from attn_exp.core.case.features import EVERY_FEATURE, FEATURES
from attn_exp.timers.trace import operators
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.measure import measure

ON_CPU = (Eager, Sdpa, Flash, Math, Reference)


def _sees(case, own, window, key):
    if case.block is not None:
        return key // case.block <= own // case.block
    if case.prefix is not None and key < case.prefix:
        return True
    return own - window < key <= own and (case.chunk is None or own // case.chunk == key // case.chunk)


def autograd_in_float64(case, inputs):
    """Out, dq, dk, dv of the formula in float64, each head apart, a query without keys giving zeros."""
    q, k, v = (tensor.detach().double().requires_grad_() for tensor in inputs.qkv)
    offset = case.kv_len - case.q_len if case.align == "bottom_right" else 0
    visible = torch.ones(case.q_len, case.kv_len, dtype=torch.bool)
    if case.causal:
        window = case.window or case.kv_len + case.q_len
        rows = range(offset, case.q_len + offset)
        visible = torch.tensor([[_sees(case, own, window, key) for key in range(case.kv_len)] for own in rows])
    batches = []
    for b in range(case.batch):
        heads = []
        for h in range(case.q_heads):
            shared = h * case.kv_heads // case.q_heads
            scores = q[b, h] @ k[b, shared].T / case.head_dim**0.5
            powers = torch.exp(scores - scores.detach().amax(-1, keepdim=True)) * visible
            heads.append(powers @ v[b, shared] / powers.sum(-1, keepdim=True).clamp(min=1e-300))
        batches.append(torch.stack(heads))
    out = torch.stack(batches)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs.d_out_bhsd.double())]


def close(found, expected):
    return all(
        torch.allclose(one.double(), other.double(), rtol=1e-4, atol=1e-4) and one.shape == other.shape
        for one, other in zip(found, expected, strict=True)
    )


@settings(max_examples=60)
@given(cases(longest=12), st.integers(0, 2**31), st.sampled_from([1, 64, 300, 1 << 26]), st.sampled_from([2, 5, 1024]))
def test_the_reference_equals_autograd_in_float64_in_slices_of_any_size(case, seed, slice_bytes, causal_rows):
    inputs = make_inputs(case, "cpu", seed, with_gradients=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_module, "SLICE_BYTES", {"cpu": slice_bytes})
        patch.setattr(reference_module, "CAUSAL_ROWS", {"cpu": causal_rows})
        found = reference(case, inputs, with_gradients=True)
    assert list(found) == ["out", "dq", "dk", "dv"]
    assert all(tensor.dtype == torch.float32 for tensor in found.values())
    assert close(found.values(), autograd_in_float64(case, inputs))


@settings(max_examples=40)
@given(packed_cases(), st.integers(0, 2**31), st.sampled_from([1, 64, 1 << 26]), st.sampled_from([2, 5, 1024]))
def test_packed_sequences_and_requests_are_each_by_itself(case, seed, slice_bytes, causal_rows):
    inputs = make_inputs(case, "cpu", seed, with_gradients=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_module, "SLICE_BYTES", {"cpu": slice_bytes})
        patch.setattr(reference_module, "CAUSAL_ROWS", {"cpu": causal_rows})
        whole = reference(case, inputs, with_gradients=True)
    row = key = 0
    for queries, keys in zip(case.lengths, case.kv_lengths or case.lengths, strict=True):
        if not queries:
            # Nobody sees its keys.
            assert not any(whole[name][:, :, key : key + keys].any() for name in ("dk", "dv"))
            key += keys
            continue
        rows, seen = slice(row, row + queries), slice(key, key + keys)
        cut = [(inputs.q_bhsd, rows), (inputs.k_bhsd, seen), (inputs.v_bhsd, seen), (inputs.d_out_bhsd, rows)]
        own = Inputs(*(tensor[:, :, where].detach().clone().requires_grad_() for tensor, where in cut))
        alone = autograd_in_float64(replace(case, lengths=None, kv_lengths=None, q_len=queries, kv_len=keys), own)
        places = (rows, rows, seen, seen)
        found = [whole[name][:, :, where] for name, where in zip(("out", "dq", "dk", "dv"), places, strict=True)]
        assert close(found, alone)
        row, key = row + queries, key + keys


def run(backend, case, inputs):
    """Output, three gradients, and the names of the operators of each pass."""
    calls = backend.prepare(case, inputs)
    with calls.scope():
        out = calls.forward()
        backward = calls.backward(out)
        first, again = backward(), backward()
        ran = {"forward": operators(calls.forward).kernels(), "backward": operators(backward).kernels()}
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert all(tensor.grad is None for tensor in inputs.qkv)
    return (out, *first), {direction: [kernel.name for kernel in kernels] for direction, kernels in ran.items()}


@pytest.mark.parametrize("backend", ON_CPU, ids=lambda backend: backend.__name__)
@settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much])
@given(case=cases(longest=40, largest_dim=24), seed=st.integers(0, 2**31))
def test_a_backend_is_right_on_a_cpu_and_runs_what_it_claims(backend, case, seed):
    made = backend("b")
    if made.unsupported(replace(case, value_dim=case.head_dim), "cpu") is None:
        case = replace(case, value_dim=case.head_dim if made.unsupported(case, "cpu") else case.value_dim)
    assume(made.unsupported(case, "cpu") is None)
    case = replace(case, dtype="float32")
    inputs = make_inputs(case, "cpu", seed, with_gradients=True)
    found, ran = run(made, case, inputs)
    assert close(found, reference(case, inputs, with_gradients=True).values())
    for direction, names in ran.items():
        claim = made.claimed_kernels(direction, "cpu")
        assert claim is None or any(re.search(claim, name) for name in names), (claim, names)


@pytest.mark.parametrize("dtype", NUMBER_DTYPES)
@pytest.mark.parametrize("backend", ON_CPU, ids=lambda backend: backend.__name__)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "q_len", "kv_len"), [(4, 4, 96, 96), (6, 2, 64, 64), (4, 1, 1, 80), (2, 2, 70, 33)]
)
def test_backends_stay_within_the_tolerance_of_each_dtype(backend, dtype, causal, q_heads, kv_heads, q_len, kv_len):
    case = Case(
        batch=2, q_heads=q_heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, head_dim=32, value_dim=32,
        dtype=dtype, causal=causal and q_len > 1, align="top_left",
    )  # fmt: skip
    inputs = make_inputs(case, "cpu", 5, with_gradients=True)
    wanted = expected(case, inputs, with_gradients=True)
    assert backend("b").unsupported(case, "cpu") is None
    found, _ = run(backend("b"), case, inputs)
    for name, tensor in zip(wanted.tensors, found, strict=True):
        assert inaccuracy({name: wanted.judge(name, tensor)}) is None


@pytest.mark.parametrize("backend", [Sdpa, Flash, Math, Efficient, Cudnn])
def test_sdpa_refuses_a_mask_whose_alignment_it_does_not_mean(backend):
    longer = replace(CASE, kv_len=32)
    said = backend("b").unsupported(longer, "cpu")
    if backend in (Sdpa, Flash, Math):
        assert said == "b aligns a causal mask top_left: set align=top_left"
        assert backend("b").unsupported(replace(longer, align="top_left"), "cpu") is None
        assert backend("b").unsupported(replace(longer, causal=False), "cpu") is None


@pytest.mark.parametrize("field", FEATURES)
def test_a_feature_is_refused_by_backends_that_do_not_name_it(field):
    values = {"softcap": 5.0, "bias": "heads", "page_size": 16, "pages": "linear", "cache_dtype": "fp8"}
    more = {"page_size": 16} if field in ("pages", "cache_dtype") else {}
    if field in ("lengths", "kv_lengths"):
        more = {"batch": 1, "lengths": (4, 12), "kv_lengths": (12, 16), "kv_len": 28}
        more |= {"kv_lengths": None, "kv_len": 16} if field == "lengths" else {}
    elif field == "empty_requests":
        more = {"batch": 1, "lengths": (0, 16)}
    else:
        more |= {field: values.get(field, True)}
    case, every = replace(CASE, **more), Supports(devices=("cpu",), dtypes=("float32",), features=EVERY_FEATURE)
    assert every.refusal(case, "cpu") is None
    kind = FEATURES[field]
    without = replace(every, features=tuple(name for name in EVERY_FEATURE if name != kind.name))
    refused = without.refusal(case, "cpu")
    assert refused is None if kind.name is None else refused.startswith(kind.has_not())


def test_refusals_on_a_cpu_name_what_to_use_instead():
    assert Cudnn("cudnn").unsupported(CASE, "cpu").startswith("cudnn runs only on NVIDIA GPUs")
    assert Efficient("b").unsupported(CASE, "cpu").startswith("b runs only on NVIDIA GPUs")
    assert "equal head dimensions, not 8 and 4" in Flash("b").unsupported(replace(CASE, value_dim=4), "cpu")
    assert "the first queries see no key" in Eager("b").unsupported(replace(CASE, q_len=17), "cpu")
    assert Eager("b").unsupported(replace(CASE, q_len=17, align="top_left"), "cpu") is None


def test_a_forced_choice_holds_inside_its_scope_and_auto_is_free_inside_another():
    case, inputs = replace(CASE, causal=False), make_inputs(CASE, "cpu", 1, with_gradients=False)
    flash, free = Flash("b").prepare(case, inputs), Sdpa("b").prepare(case, inputs)
    with Math("b").prepare(case, inputs).scope():
        assert not any("flash" in kernel.name for kernel in operators(flash.forward).kernels())
        with flash.scope():
            assert any("flash" in kernel.name for kernel in operators(flash.forward).kernels())
        with free.scope():
            assert any("flash" in kernel.name for kernel in operators(free.forward).kernels())


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_package.Attention", "cannot import backend._target_=no_such_package.Attention: No module named"),
        ("attn_exp.backends.eager.Eagre", "has no attribute 'Eagre'"),
        ("fakes.Raises", "fakes.Raises does not take the options {'name': 'b'}"),
    ],
)
def test_a_backend_that_cannot_be_loaded_is_unavailable(target, message):
    with pytest.raises(Unavailable) as raised:
        load_backend({"_target_": target, "name": "b"})
    assert message in str(raised.value)


def ordered(case=CASE, **options):
    return measure(
        make_request(
            {"_target_": "attn_exp.backends.sdpa.Priority", "name": "priority"} | options, case, passes=("forward",)
        ),
        Machine("cpu", environment={"cpu": "fake"}, ceilings={"float32": {"matmul_flops_per_s": 1e15}}),
    )


@pytest.mark.parametrize(("order", "ran"), [(["flash", "math"], "flash"), (["cudnn", "flash"], "flash")])
def test_an_order_of_preference_runs_the_first_that_can_compute_the_case(order, ran):
    record = ordered(order=order)
    assert (record.status, record.passes["forward"].took) == ("ok", ran), record.reason


def test_an_order_that_pytorch_ignores_is_never_ok(monkeypatch):
    record = ordered(order=["math", "flash"])
    assert record.status == "unsupported"
    assert "PyTorch ignores the order on a CPU, where it takes flash before math" in record.reason
    # It does: this fails with a PyTorch that heeds the order, and the refusal may go.
    q, k, v = torch.randn(3, 1, 2, 16, 8)
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        ran = operators(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)).kernels()
    assert any("flash_attention_for_cpu" in kernel.name for kernel in ran)
    # Where nobody knew of it, the kernels tell.
    monkeypatch.setattr(sdpa.Flash, "unsupported", lambda self, case, device: "flash is not here")
    record = ordered(order=["math", "flash"])
    assert (record.status, "claims /_scaled_dot_product_attention_math/" in record.reason) == ("wrong_kernel", True)
