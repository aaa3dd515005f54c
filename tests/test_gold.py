"""Eager PyTorch in the case's own dtype, which outputs and gradients may be compared with in place of float32."""

from dataclasses import replace

import pytest
from fakes import CASE, make_request

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


def test_a_wrong_output_is_told_against_eager_too():
    record = measured(f"{__name__}:Scaled", "eager")
    assert record.status == "inaccurate"


def test_the_default_is_no_part_of_the_identity_and_eager_is():
    def made(*overrides):
        overrides = (*overrides, "device=cpu")
        return request_from_config(resolved_config(compose_config(overrides, "a"), overrides), [])

    assert made().job == made("gold=float32").job != made("gold=eager").job
    for overrides, told in ((["gold=float64"], "is not one of float32, eager"),
                            (["gold=eager", "model=flux", "workload=dit_block"], "attention alone")):  # fmt: skip
        with pytest.raises(UserError, match=told):
            made(*overrides)
