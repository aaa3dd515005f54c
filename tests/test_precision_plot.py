"""The chart of error against speed over dtypes."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import sweeps

from attn_exp.results.result import decode

pytest.importorskip("matplotlib")

from attn_exp.plots.precision import pareto_front, precision_chart

WAYS = (("flash", "bfloat16", 300, 3e-3), ("cudnn", "float16", 500, 4e-4), ("fa3", "float8_e4m3fn", 900, 0.04),
        ("sage", "int8", 600, 0.012), ("triton", "bfloat16", 450, 3e-3))  # fmt: skip


def result(backend, dtype, tflops, error, inputs="normal"):
    job = sweeps.job(backend, 10.0, 20.0, of=replace(sweeps.case(), dtype=dtype))
    request = replace(job.request, measuring=replace(job.request.measuring, inputs=inputs))
    metrics = dict(job.metrics) | {"forward/tflops": float(tflops), "forward/error_out": error}
    return decode(msgspec.json.encode(replace(job, request=request, metrics=metrics)), Path("record.json"))


def test_the_front_is_what_nothing_beats_in_both():
    points = [(900, 0.04), (600, 0.012), (500, 4e-4), (450, 3e-3), (300, 3e-3), (600, 0.012), (600, 0.02), (500, 5e-4)]
    assert pareto_front(points) == [(900, 0.04), (600, 0.012), (500, 4e-4)]
    assert pareto_front([(1, 1.0), (1, 0.5), (2, 0.5)]) == [(2, 0.5)]


def test_each_kind_of_inputs_has_a_panel_with_its_points_and_front():
    made = [result(*way) for way in WAYS] + [result(*WAYS[0], "outliers"), result(*WAYS[3], "outliers")]
    chart = precision_chart(made)
    normal, outliers = chart.figure.axes
    assert [axes.get_title() for axes in (normal, outliers)] == ["inputs=normal", "inputs=outliers"]
    front, *dots = normal.lines
    assert list(front.get_xdata()) == [900, 600, 500] and list(front.get_ydata()) == [0.04, 0.012, 4e-4]
    named = {dot.get_label(): (dot.get_xdata()[0], dot.get_ydata()[0]) for dot in dots}
    assert named["sage int8"] == (600, 0.012) and named["triton bf16"] == (450, 3e-3) and len(named) == 5
    assert {text.get_text() for text in normal.texts} == {"fa3 fp8", "sage int8", "cudnn fp16"}
    assert len(outliers.lines) == 3
    assert "quantised inside of the call" in chart.caption


def test_one_dtype_has_no_such_chart():
    assert precision_chart([result("flash", "bfloat16", 300, 3e-3), result("cudnn", "bfloat16", 500, 4e-3)]) is None
