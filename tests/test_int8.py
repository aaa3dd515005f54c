"""Scores in int8: what they are judged by, and SageAttention, with a stand-in for the library."""

from dataclasses import replace

import pytest
import torch
from fakes import make_request
from standins import forward, install, visible

from attn_exp.attention.expected import expected
from attn_exp.attention.fused_formula import int8_formula, rounded_by_block
from attn_exp.attention.hard_values import make_inputs_of
from attn_exp.attention.reference import reference
from attn_exp.attention.verdict import verdict
from attn_exp.backends.base import supported_passes
from attn_exp.backends.sage import Sage
from attn_exp.core.case.case import INT8, Case
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.measure import measure

CASE = Case(
    batch=1, q_heads=4, kv_heads=2, q_len=192, kv_len=192, head_dim=64, value_dim=64, dtype=INT8, causal=True
)  # fmt: skip
FULL = replace(CASE, causal=False)
CASES = [CASE, FULL, replace(FULL, q_len=1), replace(CASE, q_len=130, kv_len=130, layout="bshd")]


def inputs_of(case, kind="normal"):
    return make_inputs_of(kind, case, "cpu", 3, with_gradients=False)


def judged(case, inputs, out):
    """Why the output is inaccurate, or None."""
    return verdict(case, inputs, expected(case, inputs, with_gradients=False), {"out": out}, {}).wrong


def plain(q, k, v, case):
    """Attention of tensors that were rounded in some way, in float16."""
    return reference(replace(case, dtype="float32"), replace(inputs_of(case), q_bhsd=q, k_bhsd=k, v_bhsd=v),
                     with_gradients=False)["out"].half()  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=Case.label)
def test_the_formula_is_attention_but_for_its_codes_whatever_keys_share(case):
    inputs = inputs_of(case)
    assert {tensor.dtype for tensor in inputs.qkv} == {torch.float16} and inputs.scales is None
    error = ((int8_formula(case, inputs) - reference(case, inputs, with_gradients=False)["out"]).norm()).item()
    shared = replace(inputs, k_bhsd=inputs.k_bhsd + 32)
    moved = (int8_formula(case, shared) - reference(case, shared, with_gradients=False)["out"]).norm().item()
    size = reference(case, inputs, with_gradients=False)["out"].norm().item()
    # Of 128 or 64 x 64 normal numbers the largest is about 4: a code is off by 0.009 on average, a score by 0.013.
    assert 0.004 < error / size < 0.02
    assert moved / size < 0.05


@pytest.mark.parametrize("kind", ["normal", "mixed", "outliers", "sharp"])
@pytest.mark.parametrize("case", CASES[:2], ids=Case.label)
def test_it_is_judged_by_three_times_the_formula_and_less_of_a_code_is_wrong(case, kind):
    inputs = inputs_of(case, kind)
    assert judged(case, inputs, int8_formula(case, inputs)) is None
    assert judged(case, inputs, reference(case, inputs, with_gradients=False)["out"].half()) is None
    # Five bits in place of eight.
    q, k = (tensor.float() for tensor in (inputs.q_bhsd, inputs.k_bhsd - inputs.k_bhsd.mean(2, keepdim=True)))
    coarse = [torch.round(one / (size := one.abs().max() / 15)) * size for one in (q, k)]
    if kind != "outliers":
        assert "out" in judged(case, inputs, plain(*coarse, inputs.v_bhsd, case))


def test_masks_off_by_one_and_padding_with_a_score_of_zero_are_inaccurate():
    inputs = inputs_of(CASE)
    assert "out" in judged(CASE, inputs, int8_formula(FULL, inputs))
    late = replace(CASE, q_len=CASE.q_len - 1)
    rows = replace(inputs, q_bhsd=inputs.q_bhsd[:, :, :-1], d_out_bhsd=inputs.d_out_bhsd[:, :, :-1])
    found = torch.cat([int8_formula(late, rows), int8_formula(CASE, inputs)[:, :, -1:]], 2)
    assert "visible" in judged(CASE, inputs, found) or "off by" in judged(CASE, inputs, found)
    # As sageattention 1.0.6 computes 200 keys without a mask: its tiles end with 56 keys that it does not hide.
    short, padded = replace(FULL, kv_len=200), replace(FULL, kv_len=256)
    inputs = inputs_of(short)
    zeros = [torch.nn.functional.pad(tensor, (0, 0, 0, 56)) for tensor in (inputs.k_bhsd, inputs.v_bhsd)]
    assert "out is" in judged(short, inputs, plain(inputs.q_bhsd, *zeros, padded))


def install_sage(monkeypatch, calls=None):
    """`sageattn` by its signature and documentation; keys lose their mean in place, as in 1.0.6."""

    def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, smooth_k=True, **kwargs):
        assert tensor_layout == "HND" and sm_scale is None and not kwargs
        assert q.dtype == k.dtype == v.dtype == torch.float16 and q.shape[-1] in (64, 96, 128)
        assert all(tensor.stride(-1) == 1 for tensor in (q, k, v))
        assert not is_causal or q.shape[2] == k.shape[2]
        if smooth_k:
            k -= k.mean(dim=2, keepdim=True)
        if calls is not None:
            calls.append(k.mean(dim=2).abs().max().item())
        q, k = rounded_by_block(q, 128), rounded_by_block(k, 64)
        seen = visible(q.shape[2], k.shape[2], -1, 0 if is_causal else -1)
        out, _ = forward(*(tensor.transpose(1, 2) for tensor in (q, k, v)), seen)
        return out.transpose(1, 2).half()

    install(monkeypatch, "sageattention.core", sageattn=sageattn)


@pytest.mark.parametrize("case", CASES, ids=Case.label)
def test_sage_is_right_and_leaves_the_keys_as_they_are(case, monkeypatch):
    means = []
    install_sage(monkeypatch, means)
    inputs = inputs_of(case)
    before = inputs.k_bhsd.clone()
    calls = Sage("sage").prepare(case, inputs)
    out = calls.forward()
    assert judged(case, inputs, out) is None
    assert torch.equal(calls.forward(), out) and torch.equal(inputs.k_bhsd, before)
    Sage("sage", smooth_k=False).prepare(case, inputs).forward()
    smoothed, _, rough = means
    assert smoothed < 0.01 < rough


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"dtype": "float16"}, "computes int8, not float16"),
        ({"head_dim": 32, "value_dim": 32}, "has head dimensions 64 or 96 or 128, not 32"),
        ({"q_len": 100}, "has a causal mask only for as many keys as queries"),
        ({"causal": False, "kv_len": 200}, "needs multiples of 64 keys without a mask, not 200"),
        ({"q_len": 100, "kv_len": 100}, None),
    ],
)
def test_sage_says_what_it_does_not_compute(changes, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    said = Sage("sage").unsupported(replace(CASE, **changes), "cuda")
    assert said is None if words is None else words in said
    assert supported_passes(Sage("sage"), CASE) == ("forward",)


class SageOnCpu(Sage):
    """As if its stand-in ran on a GPU."""

    def unsupported(self, case, device):
        return None


class Coarse(SageOnCpu):
    """Scores of five bits."""

    def prepare(self, case, inputs):
        calls = super().prepare(case, inputs)

        def less():
            q, k = (inputs.q_bhsd.float(), (inputs.k_bhsd - inputs.k_bhsd.mean(2, keepdim=True)).float())
            return plain(*(torch.round(one / (s := one.abs().max() / 15)) * s for one in (q, k)), inputs.v_bhsd, case)

        return replace(calls, forward=less)


def job(backend, **measuring):
    machine = Machine("cpu", environment={"cpu": "fake"}, ceilings={INT8: {"matmul_flops_per_s": 1e12}})
    return measure(make_request(f"test_int8.{backend}", CASE, **measuring), machine)


def test_a_job_at_int8_goes_from_its_request_to_a_record(monkeypatch):
    install_sage(monkeypatch)
    record = job("SageOnCpu", passes=("forward",))
    assert record.status == "ok", record.reason
    error = record.passes["forward"].errors["out"]
    assert 0.004 < error.relative < 0.02 < error.tolerance < 0.06
    assert record.request.case.dtype == INT8 and " int8 " in record.request.case.label()
    coarse = job("Coarse", passes=("forward",))
    assert coarse.status == "inaccurate" and "out" in coarse.reason
    backward = job("SageOnCpu")
    assert (backward.status, backward.reason) == ("unsupported", "fake has no backward of int8: set passes=[forward]")
