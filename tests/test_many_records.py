"""What thousands of records cost to read, compare and report. Work is counted, so that load changes nothing."""

import sys
from pathlib import Path

import msgspec
import pytest
import sweeps
from matplotlib.collections import LineCollection

from attn_exp.compare.answer import compare_read
from attn_exp.compare.choice import Choice
from attn_exp.compare.pages import page
from attn_exp.compare.render import text_of
from attn_exp.plots.lengths import lengths_chart
from attn_exp.plots.style import svg
from attn_exp.results.read import Sweep
from attn_exp.results.result import decode

BACKENDS = ("flash", "cudnn", "efficient", "math")


def contents(count, batch=1):
    """The files of `count` records: four backends, and a length for each four of them."""
    return [
        msgspec.json.encode(
            sweeps.job(
                BACKENDS[number % 4],
                100.0 + number % 4,
                of=sweeps.case(batch=batch, seq_len=128 + number // 4),
                flags=("drift",),
            )
        )
        for number in range(count)
    ]


def calls_of(files):
    """The calls of Python and C functions that it takes to read, compare and report these files."""
    count = 0

    def counted(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        results = tuple(decode(content, Path(f"{number}/record.json")) for number, content in enumerate(files))
        compared = compare_read(Choice(baseline="flash"), [Sweep("s", "s", results)])
        report = text_of(page(compared), "html")
    finally:
        sys.setprofile(None)
    assert report.count("<tr") > 2 * len(files)
    return count


def test_reading_comparing_and_reporting_is_linear_in_the_records():
    calls_of(contents(8))  # what is imported, parsed and kept once
    few, many = calls_of(contents(100, batch=2)), calls_of(contents(200, batch=3))
    assert many < 2.15 * few


@pytest.mark.parametrize(
    ("lengths", "drawn", "caption"), [(60, "errorbar", "Bars: "), (61, "band", "Bars and bands: ")]
)
def test_many_lengths_are_a_band_instead_of_a_bar_each(lengths, drawn, caption):
    results = [decode(content, Path("record.json")) for content in contents(4 * lengths)]
    chart = lengths_chart(results)
    assert caption in chart.caption
    # A curve's bars are a collection of lines with caps, and a band is one polygon.
    bars = [isinstance(one, LineCollection) for panel in chart.figure.axes for one in panel.collections]
    assert len(bars) >= 8 and bars == [drawn == "errorbar"] * len(bars)
    if drawn == "band":
        assert svg(chart).count("<use") < 200
