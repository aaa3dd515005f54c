"""`passes=[step]`: a forward and its backward as one measured call, judged as the others are."""

import csv
import itertools
import re
from dataclasses import replace

import cli
import pytest
from fakes import CASE, Honest, make_request
from test_measure import CEILINGS, machine, measured, short_rounds  # noqa: F401  (fixtures)

from attn_exp.core.case.case import HALVES
from attn_exp.core.case.flops import flops
from attn_exp.worker.measure import measure

STEP = {"passes": ("step",)}


class Stale(Honest):
    """Returns the output, or the gradients, of its eighth call in all later ones."""

    def __init__(self, name, how):
        super().__init__(name)
        self.how = how

    def prepare(self, case, inputs):
        calls, kept, count = super().prepare(case, inputs), {}, itertools.count(1)

        def last(name, made):
            return kept.setdefault(name, made) if name == self.how and next(count) >= 8 else made

        def backward(out):
            right = calls.backward(out)
            return lambda: last("gradients", right())

        return replace(calls, forward=lambda: last("output", calls.forward()), backward=backward)


def test_a_step_is_timed_and_judged_as_a_whole(machine, tmp_path):  # noqa: F811
    record = measured("fakes.Honest", machine, tmp_path, **STEP)
    assert (record.status, set(record.passes)) == ("ok", {"step"})
    assert set(record.passes["step"].errors) == {"out", "dq", "dk", "dv"}
    assert record.metrics["step/time_us"] > 0 and record.passes["step"].first_call_s > 0
    assert record.metrics["step/tflops"] == pytest.approx(flops(CASE, "step") / record.metrics["step/time_us"] / 1e6)
    assert record.metrics["step/error_dk"] > 0
    judged = {one.call: one for one in record.judged if one.passes == ("step",)}
    assert set(judged) == {"timed"}
    names = [kernel.name for kernel in record.passes["step"].kernels]
    assert any("bmm" in name for name in names) and any("backward" in name.lower() for name in names)


def test_a_step_beside_the_halves_runs_what_both_run(machine, tmp_path):  # noqa: F811
    record = measured("fakes.Honest", machine, tmp_path, passes=(*HALVES, "step"))
    assert (record.status, tuple(record.passes)) == ("ok", (*HALVES, "step"))
    forward, backward, step = ({one.name for one in measured.kernels} for measured in record.passes.values())
    assert forward | backward <= step | {"aten::detach", "detach"}
    assert {one.passes for one in record.judged if one.call == "timed"} == {("forward",), ("backward",), ("step",)}


@pytest.mark.parametrize("how", ["output", "gradients"])
def test_a_gradient_of_an_earlier_step_is_no_result(machine, how):  # noqa: F811
    backend = {"_target_": "test_step.Stale", "name": "stale", "how": how}
    record = measure(make_request(backend, **STEP), machine)
    assert record.status == "inaccurate" and record.reason.startswith("step: "), record.reason


@pytest.mark.parametrize(
    ("backend", "status"),
    [("fakes.ZeroGradients", "inaccurate"), ("fakes.LiarInBackward", "wrong_kernel"), ("fakes.ForwardOnly", "error")],
)
def test_a_wrong_half_is_a_wrong_step(machine, backend, status):  # noqa: F811
    record = measure(make_request(backend, **STEP), machine)
    assert (record.status, record.metrics) == (status, {}), record.reason


@pytest.mark.parametrize("how", ["no gradients", "not a number"])
def test_a_step_that_goes_wrong_later_is_found(machine, how):  # noqa: F811
    backend = {"_target_": "fakes.RightAtFirst", "name": "late", "how": how, "right": 4}
    record = measure(make_request(backend, **STEP), machine)
    assert record.status == "inaccurate" and re.match("step: |on values of which small", record.reason), record.reason


def test_codes_have_no_step(machine):  # noqa: F811
    record = measure(make_request("fakes.Honest", replace(CASE, dtype="float8_e4m3fn"), **STEP), machine)
    assert record.status == "unsupported"
    assert "needs the scales of a step before it: set passes=[forward,backward]" in record.reason


def test_a_step_is_in_every_table_and_comparison(tmp_path):
    words = ("-m", *cli.QUICK, "backend=flash,eager", "passes=[step]", "sweep=s", "save_plots=true")
    done = cli.run(*words, cwd=tmp_path)
    assert done.returncode == 0
    folder = tmp_path / "multirun" / "s"
    # The report is among what a sweep says at its end, if it has one.
    assert "report with plots: multirun/s/report.html" in done.stdout.splitlines()
    assert (folder / "report.html").is_file()
    with (folder / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 and all(float(row["step/time_us"]) > 0 and row["forward/time_us"] == "" for row in rows)
    assert all(row["step/kernels"] for row in rows)
    assert "step" in (folder / "table.txt").read_text()
    said = cli.run("compare", "s", "out=report.html", "where=step/time_us>0", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    said = cli.run("compare", "s", cwd=tmp_path)
    assert "step" in said.stdout
    assert "step" in (tmp_path / "report.html").read_text()
    page = cli.run("explain", "s/flash", cwd=tmp_path)
    assert page.returncode == 0 and "step: " in page.stdout, page.stderr
