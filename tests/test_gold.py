"""Eager PyTorch in the case's own dtype, which outputs and gradients may be compared with in place of float32."""

from dataclasses import replace

import pytest
import torch
from fakes import CASE, make_request

from attn_exp.attention.error import ulps_of
from attn_exp.backends.base import calls_of
from attn_exp.backends.eager import Eager
from attn_exp.config.compose import compose_config, resolved_config
from attn_exp.config.request import request_from_config
from attn_exp.core.errors import UserError
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.measure import measure

CEILINGS = {"copy_bytes_per_s": 1e10, "matmul_flops_per_s": 1e11}


class Scaled(Eager):
    """Its output is 5 % too large."""

    claims = {}

    def prepare(self, case, inputs):
        whole = super().prepare(case, inputs).attention
        return calls_of(lambda q, k, v: 1.05 * whole(q, k, v), inputs)


def measured(backend, gold):
    case = replace(CASE, dtype="bfloat16")
    request = make_request({"_target_": backend, "name": "b"}, case, gold=gold, passes=("forward", "backward"))
    return measure(request, Machine(device="cpu", ceilings={case.dtype: CEILINGS}))


@pytest.mark.parametrize("sampled", [False, True])
def test_eager_is_off_by_nothing_from_itself_and_others_are_off_by_the_rounding_of_both(monkeypatch, sampled):
    monkeypatch.setattr("attn_exp.attention.expected.worth_sampling", lambda *sizes: sampled)
    eager, flash = "attn_exp.backends.eager.Eager", "attn_exp.backends.sdpa.Flash"
    found = {(backend, gold): measured(backend, gold) for backend in (eager, flash) for gold in ("float32", "eager")}
    assert {record.status for record in found.values()} == {"ok"}, [record.reason for record in found.values()]
    errors = {key: [record.metrics["forward/error_out"], record.metrics["backward/error_dk"]]
              for key, record in found.items()}  # fmt: skip
    assert errors[eager, "eager"] == [0, 0]
    assert min(errors[eager, "float32"]) > 1e-3
    assert min(errors[flash, "eager"]) > 1e-3
    assert errors[flash, "eager"] != errors[flash, "float32"]


def test_errors_in_units_in_the_last_place_have_an_interval_and_a_sign():
    right = 0.7 * torch.randn((2, 8, 64, 32), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    unit = torch.finfo(torch.bfloat16).eps * right.square().mean().sqrt()
    rounded, large = (ulps_of((right + off * unit * right.sign()).bfloat16(), right) for off in (0.0, 1.0))
    # Rounding leaves the root of a twelfth of a unit in the last place of each number.
    assert 0.15 < rounded.rms < 0.29 and rounded.rms_half_width < 0.05 * rounded.rms
    assert abs(rounded.mean) < 2 * rounded.mean_half_width < 0.05
    assert abs(large.mean - 1.0) < 2 * large.mean_half_width < 0.05
    assert ulps_of(right[:1, :1].bfloat16(), right[:1, :1]).rms_half_width is None
    assert ulps_of(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4, dtype=torch.float64)) is None


def test_a_record_has_them_with_float64_as_the_reference():
    record = measured("attn_exp.backends.sdpa.Flash", "float64")
    assert record.status == "ok", record.reason
    for direction, name in (("forward", "out"), ("backward", "dq"), ("backward", "dk"), ("backward", "dv")):
        ulps = record.passes[direction].errors[name].ulps
        assert record.metrics[f"{direction}/error_{name}_ulp"] == ulps.rms > 0.1
        assert record.metrics[f"{direction}/error_{name}_ulp_mean"] == ulps.mean


def test_a_wrong_output_is_told_against_eager_too():
    record = measured(f"{__name__}:Scaled", "eager")
    assert record.status == "inaccurate"


def test_the_default_is_no_part_of_the_identity_and_eager_is():
    def made(*overrides):
        overrides = (*overrides, "device=cpu")
        return request_from_config(resolved_config(compose_config(overrides, "a"), overrides), [])

    assert made().job == made("gold=float32").job != made("gold=eager").job
    for overrides, told in ((["gold=double"], "is not one of float32, float64, eager"),
                            (["gold=eager", "model=flux", "workload=dit_block"], "attention alone")):  # fmt: skip
        with pytest.raises(UserError, match=told):
            made(*overrides)
