"""What thousands of records cost to read, compare and report. Work is counted, so that load changes nothing."""

import sys
from pathlib import Path

import msgspec
import sweeps

from attn_exp.comparison.answer import compare_read
from attn_exp.comparison.choice import Choice
from attn_exp.comparison.pages import page
from attn_exp.core.sheet.render import text_of
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
