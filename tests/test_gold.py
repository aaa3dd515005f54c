"""Eager PyTorch in the case's own dtype, which outputs and gradients may be compared with in place of float32."""

from dataclasses import replace

import pytest
import torch
from fakes import CASE, make_request

from attn_exp.attention.reference import reference
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


class Rounded(Eager):
    """Its output is that of float64, and `off` units in the last place too far from zero."""

    claims = {}

    def prepare(self, case, inputs):
        def attention(q, k, v):
            out = reference(case, replace(inputs, q_bhsd=q, k_bhsd=k, v_bhsd=v), with_gradients=False,
                            precision=torch.float64)["out"]  # fmt: skip
            unit = 2.0**-7 * 2.0 ** out.square().mean().sqrt().log2().floor()
            return (out + self.off * unit * out.sign()).to(q.dtype)

        return calls_of(attention, inputs)

    off = 0.0


class TooLarge(Rounded):
    off = 0.1


def test_errors_in_units_in_the_last_place_have_an_interval_and_a_sign():
    case = replace(CASE, q_heads=16, kv_heads=16, q_len=128, kv_len=128, head_dim=64, value_dim=64, dtype="bfloat16")
    ulps = {}
    for backend in (Rounded, TooLarge):
        request = make_request({"_target_": f"{__name__}:{backend.__name__}", "name": "b"}, case, gold="float64",
                               passes=("forward",))  # fmt: skip
        record = measure(request, Machine(device="cpu", ceilings={case.dtype: CEILINGS}))
        assert record.status == "ok", record.reason
        ulps[backend] = record.passes["forward"].errors["out"].ulps
        assert record.metrics["forward/error_out_ulp"] == ulps[backend].rms
    exact, large = ulps[Rounded], ulps[TooLarge]
    # Rounding alone: the root of a twelfth where numbers are as large as their root mean square, less where smaller.
    assert 0.15 < exact.rms < 0.35 and exact.rms_half_width < 0.1 * exact.rms
    assert abs(exact.mean) < 2 * exact.mean_half_width < 0.02
    assert 0.05 < large.mean - large.mean_half_width < large.mean < 0.15


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
