"""Codes of 8 bits: what they mean, what they are judged by, and who takes them, with stand-ins for the libraries."""

from dataclasses import replace

import pytest
import torch
import yaml
from fake_cudnn import FakeCudnn, in_place_of_cudnn
from fakes import make_request, make_timing
from standins import install_fa3
from test_conf import CONF

from attn_exp.attention.error import inaccuracy
from attn_exp.attention.expected import expected
from attn_exp.attention.fused_formula import fp8_formula
from attn_exp.attention.inputs import make_inputs
from attn_exp.attention.reference import reference
from attn_exp.backends import cudnn_fp8
from attn_exp.backends.base import load_backend, supported_passes
from attn_exp.backends.cudnn_fp8 import fp8_refusal
from attn_exp.backends.cudnn_graph import CudnnGraph
from attn_exp.backends.fa3 import FlashAttention3
from attn_exp.backends.package import Refused
from attn_exp.core.case.case import E4M3, Case
from attn_exp.core.case.flops import flops
from attn_exp.core.host.hardware import datasheet_peak
from attn_exp.core.record.limits import above_datasheet
from attn_exp.core.record.metrics import pass_metrics
from attn_exp.core.record.record import PassRecord
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.measure import measure

CASE = Case(
    batch=1, q_heads=4, kv_heads=2, q_len=160, kv_len=160, head_dim=64, value_dim=64, dtype=E4M3, causal=True
)  # fmt: skip
NAMES = ("out", "dq", "dk", "dv")


@pytest.fixture
def fake(monkeypatch):
    return in_place_of_cudnn(monkeypatch)


def inputs_of(case, with_gradients=True, seed=3):
    return make_inputs(case, "cpu", seed, with_gradients=with_gradients)


def judged(case, inputs, found, scales=None):
    """Why the tensors are inaccurate, or None."""
    wanted = expected(case, inputs, with_gradients="dq" in found)
    scales = scales or {}
    return inaccuracy({name: wanted.judge(name, tensor, scales.get(name, 1.0)) for name, tensor in found.items()})


def test_the_reference_is_of_the_numbers_that_the_codes_mean():
    inputs = inputs_of(CASE)
    of_codes = reference(CASE, inputs, with_gradients=True)
    of_numbers = reference(replace(CASE, dtype="float32"), inputs.numbers(), with_gradients=True)
    assert all(torch.equal(of_codes[name], of_numbers[name]) for name in NAMES)
    of_drawn = reference(CASE, inputs_of(replace(CASE, dtype="float32")), with_gradients=True)
    assert (of_codes["out"] - of_drawn["out"]).norm() / of_drawn["out"].norm() > 0.01


FORMULA_CASES = [
    CASE,
    replace(CASE, causal=False, kv_len=96),
    replace(CASE, softcap=3.0),
    replace(CASE, lengths=(60, 100), kv_heads=4),
]


@pytest.mark.parametrize("case", FORMULA_CASES, ids=Case.label)
def test_the_plain_formula_is_attention_but_for_rounding_to_codes(case):
    inputs = inputs_of(case)
    exact = reference(case, inputs, with_gradients=True, precision=torch.float64)
    for name, tensor in fp8_formula(case, inputs, with_gradients=True).items():
        error = ((tensor - exact[name]).norm() / exact[name].norm()).item()
        # p or ds rounded once, the result once more: 1/16 a number at most, 0.026 in the mean, and uncorrelated.
        assert 0.02 < error < 0.06, (name, error)


def wrong(**scales):
    """Inputs whose codes are taken for something else."""
    return lambda inputs: replace(inputs, scales=replace(inputs.scales, **scales))


@pytest.mark.parametrize(
    ("spoil", "tensor"),
    [
        (wrong(q=1.0), "out"),
        (wrong(k=1.0), "out"),
        (wrong(v=1.0), "out"),
        (wrong(d_out=1.0), "dq"),
        (lambda inputs: replace(inputs, k_bhsd=inputs.v_bhsd), "out"),
    ],
)
def test_a_scale_that_was_forgotten_is_inaccurate(spoil, tensor):
    inputs = inputs_of(CASE)
    assert f"{tensor} is off by" in judged(CASE, inputs, fp8_formula(CASE, spoil(inputs), with_gradients=True))


def test_masks_off_by_one_lost_keys_and_lost_gradients_are_inaccurate():
    inputs = inputs_of(CASE)
    full = replace(CASE, causal=False)
    found = fp8_formula(CASE, inputs, with_gradients=True)
    assert judged(CASE, inputs, fp8_formula(full, inputs, with_gradients=False))
    shifted = replace(CASE, q_len=CASE.q_len - 1)
    rows = replace(inputs, q_bhsd=inputs.q_bhsd[:, :, :-1], d_out_bhsd=inputs.d_out_bhsd[:, :, :-1])
    # Bottom-right, a query less: each sees one key more than its own.
    late = fp8_formula(shifted, rows, with_gradients=False)["out"]
    assert judged(CASE, inputs, {"out": torch.cat([late, found["out"][:, :, -1:]], 2)})
    fewer = fp8_formula(replace(full, kv_len=128), _first_keys(inputs, 128), with_gradients=False)
    assert judged(full, inputs, fewer)
    assert judged(CASE, inputs, found | {"dk": torch.zeros_like(found["dk"])})
    assert judged(CASE, inputs, found | {"dq": found["dk"].repeat_interleave(2, 1)})


def _first_keys(inputs, count):
    return replace(inputs, k_bhsd=inputs.k_bhsd[:, :, :count], v_bhsd=inputs.v_bhsd[:, :, :count])


def configs():
    return [yaml.safe_load(path.read_text()) for path in sorted((CONF / "backend").glob("*.yaml"))]


@pytest.mark.parametrize("config", configs(), ids=lambda config: config["name"])
def test_only_some_backends_have_a_dtype_of_8_bits(config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    case = replace(CASE, kv_heads=4, head_dim=128, value_dim=128)
    for dtype, having in (("float8_e4m3fn", ("cudnn_graph", "fa3")), ("int8", ("sage",))):
        said = load_backend(config).unsupported(replace(case, dtype=dtype), "cuda")
        assert said is None if config["name"] in having else said.endswith(f", not {dtype}")


@pytest.mark.parametrize(
    ("changes", "capability", "words"),
    [
        ({}, (8, 9), "from compute capability 9.0 on, this GPU has 8.9"),
        ({"head_dim": 72}, (9, 0), "multiples of 16 at float8_e4m3fn, not 72"),
        ({"kv_len": 320}, (9, 0), "set align=top_left"),
        ({"kv_len": 320}, (10, 0), None),
        ({"kv_len": 320, "align": "top_left"}, (9, 0), None),
    ],
)
def test_cudnn_refuses_what_no_version_of_it_has(changes, capability, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    case = replace(CASE, **changes)
    said = CudnnGraph("c").unsupported(case, "cuda")
    assert (said is None) if words is None else (said.startswith("c ") and words in said)
    assert fp8_refusal(case, capability) == (said.removeprefix("c ") if said else None)


def test_flash_attention_3_has_the_forward_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    backend = FlashAttention3("fa3")
    assert supported_passes(backend, CASE) == ("forward",)
    assert supported_passes(backend, replace(CASE, dtype="bfloat16")) == ("forward", "backward")
    assert "multiples of 16" in backend.unsupported(replace(CASE, head_dim=72, value_dim=72), "cuda")
    assert backend.unsupported(replace(CASE, head_dim=72, value_dim=72, dtype="bfloat16"), "cuda") is None


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_flash_attention_3_is_given_what_the_codes_are_worth(kv_heads, monkeypatch):
    install_fa3(monkeypatch)
    case = replace(CASE, kv_heads=kv_heads, batch=2)
    inputs = inputs_of(case, with_gradients=False)
    calls = FlashAttention3("fa3").prepare(case, inputs)
    out = calls.forward()
    assert out.dtype == torch.bfloat16
    assert judged(case, inputs, {"out": out}, calls.scales) is None
    compiled = torch.compile(calls.attention, fullgraph=True, backend="aot_eager")(*calls.inputs.qkv)
    assert torch.equal(compiled, out)
    torch.compiler.reset()


CUDNN_CASES = [
    CASE,
    replace(CASE, causal=False),
    replace(CASE, kv_heads=4, layout="bshd"),
    replace(CASE, causal=False, q_len=64, kv_len=96, value_dim=32),
]


@pytest.mark.parametrize("api", ["binding", "wrapper"])
@pytest.mark.parametrize("case", CUDNN_CASES, ids=Case.label)
def test_cudnn_is_told_scales_that_make_its_codes_right(fake, case, api):
    inputs = inputs_of(case)
    calls = CudnnGraph("c", api=api).prepare(case, inputs)
    out = calls.forward()
    gradients = calls.backward(out)()
    assert [tensor.stride() for tensor in gradients] == [tensor.stride() for tensor in inputs.qkv]
    found = dict(zip(NAMES, (out, *gradients), strict=True))
    assert {tensor.dtype for tensor in found.values()} == {torch.float8_e4m3fn}
    assert judged(case, inputs, found, calls.scales) is None
    # Half of 448: those of a later step with gradients twice as large are not cut off.
    assert all(tensor.float().abs().max() == 224 for tensor in gradients)
    assert judged(case, inputs, {"out": out}) is not None, "codes are no numbers"
    for name in ("dq", "dk", "dv"):
        assert calls.notes[f"scale_{name}"] == calls.scales[name] > 0


class CudnnOnCpu(CudnnGraph):
    """As if its stand-in ran on a GPU."""

    def unsupported(self, case, device):
        return None


class Flash3OnCpu(FlashAttention3):
    """As if its stand-in ran on a GPU."""

    def unsupported(self, case, device):
        return None


def job(backend, **measuring):
    machine = Machine("cpu", environment={"cpu": "fake"}, ceilings={E4M3: {"matmul_flops_per_s": 1e12}})
    return measure(make_request(f"test_quantised.{backend}", CASE, **measuring), machine)


def test_a_job_at_fp8_goes_from_its_request_to_a_record(fake):
    record = job("CudnnOnCpu")
    assert record.status == "ok", record.reason
    assert "e4m3" in record.environment["inputs"]
    for name, error in (record.passes["forward"].errors | record.passes["backward"].errors).items():
        assert 0.02 < error.relative < 0.06 < error.tolerance < 0.16, name
    assert record.notes["scale_dq"] > 0
    assert record.metrics["forward/flops_of_measured"] > 0


@pytest.mark.parametrize("forgotten", ["descale_q", "descale_v"])
def test_a_job_whose_backend_forgets_a_scale_is_inaccurate(fake, monkeypatch, forgotten):
    known = cudnn_fp8._common_scales
    monkeypatch.setattr(cudnn_fp8, "_common_scales", lambda scales: known(scales) | {forgotten: 1.0})
    record = job("CudnnOnCpu", passes=("forward",))
    assert record.status == "inaccurate"
    assert record.reason.startswith("out is off by")


def test_a_job_of_a_backward_that_there_is_not_says_what_to_set(monkeypatch):
    install_fa3(monkeypatch)
    record = job("Flash3OnCpu")
    assert (record.status, record.reason) == (
        "unsupported",
        "fake has no backward of float8_e4m3fn: set passes=[forward]",
    )
    assert job("Flash3OnCpu", passes=("forward",)).status == "ok"


def test_a_backward_that_cudnn_does_not_have_is_refused_in_its_words_with_what_to_set(fake):
    calls = CudnnGraph("c").prepare(CASE, inputs_of(CASE))
    out = calls.forward()
    fake.complaint = FakeCudnn.cudnnGraphNotSupportedError("hidden_dim shoud be equal to 128")
    with pytest.raises(Refused, match=r"hidden_dim shoud be equal to 128: set passes=\[forward\]"):
        calls.backward(out)


def test_rates_are_held_against_the_datasheet_where_it_has_fp8():
    hopper, ampere = datasheet_peak("NVIDIA H200"), datasheet_peak("NVIDIA A100-SXM4-80GB")
    assert hopper.flops[E4M3] == hopper.flops_limit(E4M3) == 1979e12
    assert ampere.flops_limit(E4M3) is None
    big = replace(CASE, batch=8, q_heads=16, kv_heads=16, q_len=4096, kv_len=4096, causal=False)
    seconds = flops(big, "forward") / 1500e12
    timing = make_timing((seconds * 1e6,) * 3)
    measured = PassRecord(first_call_s=0.1, timings=(timing,))
    for peak, share in ((hopper, 1500 / 1979), (ampere, None)):
        assert above_datasheet(big, "forward", timing, peak) is None
        found = pass_metrics(big, "forward", measured, saves_lse=False, ceilings={}, peak=peak)
        assert found.get("forward/flops_of_peak") == (share if share is None else pytest.approx(share))
    faster = replace(timing, times_us=tuple(time / 2 for time in timing.times_us))
    assert "above the H200 SXM's peak of 1,979" in above_datasheet(big, "forward", faster, hopper)
