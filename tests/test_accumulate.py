"""Backwards that add their gradients to those of earlier calls, as PyTorch's attention benchmark measures them."""

import csv
from collections import Counter
from dataclasses import replace

import fakes
import pytest
import sweeps
import torch
from fakes import CASE
from test_measure import machine, measured, short_rounds  # noqa: F401

from attn_exp.attention.inputs import Accumulator, autograd_backward, make_inputs
from attn_exp.comparison.join import method_key
from attn_exp.config.request import _identity
from attn_exp.results.duel_command import duel_command
from attn_exp.results.result import result_of
from attn_exp.results.table import csv_text, job_line, table
from attn_exp.timers.trace import operators
from attn_exp.tracking.base import params

BACKWARDS = pytest.mark.parametrize("passes", [("forward", "backward"), ("step",)], ids=["backward", "step"])


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_sums_are_those_of_autograd_by_the_same_operators(layout):
    case = replace(CASE, layout=layout, dtype="bfloat16")
    inputs = make_inputs(case, "cpu", 0, with_gradients=True)
    out = torch.nn.functional.scaled_dot_product_attention(*inputs.qkv, is_causal=True)
    gradient = inputs.d_out_bhsd if hasattr(inputs, "d_out_bhsd") else inputs.d_out
    accumulator = Accumulator(inputs)
    ours = accumulator.backward(autograd_backward(inputs, out))
    for _ in range(3):
        returned = ours()
        out.backward(gradient, retain_graph=True)
    theirs = [leaf.grad for leaf in inputs.leaves]
    for kept, their in zip(accumulator.sums, theirs, strict=True):
        assert torch.equal(kept, their) and kept.stride() == their.stride()
    alone = torch.autograd.grad(out, inputs.leaves, gradient, retain_graph=True)
    assert all(torch.equal(one, other) for one, other in zip(returned, alone, strict=True)), "not the sums"

    def adds(call):
        return Counter(one.name for one in operators(call).calls[0].activities)["aten::add_"]

    assert adds(ours) == adds(lambda: out.backward(gradient, retain_graph=True)) == 3


@BACKWARDS
def test_the_judge_compares_the_gradients_of_a_call_and_not_their_sums(machine, tmp_path, passes):  # noqa: F811
    record = measured("fakes.Honest", machine, tmp_path, passes=passes, accumulate=True)
    assert record.status == "ok", record.reason
    for direction in passes:
        adding = "aten::add_" in {kernel.name for kernel in record.passes[direction].kernels}
        assert adding == (direction != "forward")
        assert "timed" in {one.call for one in record.judged}
    assert record.passes[passes[-1]].errors["dq"].relative < 1e-5


@pytest.mark.parametrize("right", [1, 2, 3])
def test_a_backward_that_is_wrong_later_is_found_as_without_sums(machine, tmp_path, right):  # noqa: F811
    target = {"_target_": "fakes.RightAtFirst", "name": "fake", "how": "no gradients", "right": right}
    record = measured(target, machine, tmp_path, accumulate=True)
    assert record.status == "inaccurate"
    assert "is off by 1 of" in record.reason


def test_gradients_of_the_first_backward_that_are_kept_are_found(machine, tmp_path):  # noqa: F811
    record = measured("test_accumulate.KeepsItsGradients", machine, tmp_path, accumulate=True)
    assert record.status in ("inaccurate", "implausible")


class KeepsItsGradients(fakes.Honest):
    """Returns what the first backward of a forward computed."""

    def prepare(self, case, inputs):
        calls = super().prepare(case, inputs)

        def backward(out):
            call, kept = calls.backward(out), []
            return lambda: kept[0] if kept else kept.append(call()) or kept[0]

        return replace(calls, backward=backward)


def test_codes_cannot_be_added(machine, tmp_path):  # noqa: F811
    record = measured("fakes.Honest", machine, tmp_path, replace(CASE, dtype="float8_e4m3fn"), accumulate=True)
    assert record.status == "unsupported"
    assert "cannot be added: set accumulate=false" in record.reason


def test_rows_with_and_without_sums_are_other_jobs_and_are_not_compared():
    plain = sweeps.job("flash", 100.0)
    adding = sweeps.job("flash", 100.0, 300.0, measuring={"accumulate": True})
    assert plain.request.job != adding.request.job
    explicit = replace(plain.request, measuring=replace(plain.request.measuring, accumulate=False))
    assert _identity(plain.request) == _identity(explicit) != _identity(adding.request)
    one, other = result_of(plain), result_of(adding)
    assert method_key(one) != method_key(other)
    assert " accumulate  " in job_line(other) and "accumulate" not in job_line(one)
    assert "accumulate" in table([one, other]) and "accumulate" not in table([one])
    rows = csv.DictReader(csv_text([one, other]).splitlines())
    assert [row["accumulate"] for row in rows] == ["False", "True"]
    assert params(other)["accumulate"] == "True" and "accumulate" not in params(one)
    rival = result_of(sweeps.job("cudnn", 99.0, 299.0, measuring={"accumulate": True}))
    assert " accumulate=true" in duel_command(other, rival, {"backward"})
