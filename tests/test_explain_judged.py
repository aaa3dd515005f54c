"""The lines about what was judged: which calls on which inputs, how much of them, and the source."""

from dataclasses import replace

import sweeps

from attn_exp.commands.explain import main
from attn_exp.core.record.checked import Form, Judged
from attn_exp.core.record.record import Traced
from attn_exp.core.text import WIDTH
from attn_exp.explain.conditions import judged_lines

SHAPE, STRIDES = (4, 16, 1024, 128), (2097152, 131072, 128, 1)
FORM = Form(dtype="bfloat16", shape=SHAPE, strides=STRIDES)
GRADIENTS = dict.fromkeys(("dq", "dk", "dv"), FORM)
CHANGED = "normal(0, 1), signs changed"
BOTH = ("forward", "backward")
JUDGED = (
    Judged(
        call="first", passes=BOTH, inputs="normal(0, 1)", largest_score=5.25, rows=65536, rows_of=65536, heads=64,
        form={"out": FORM, **GRADIENTS},
    ),
    Judged(call="hard", passes=BOTH, inputs="hard", largest_score=93.1, rows=65536, rows_of=65536, heads=64),
    Judged(
        call="timed", passes=("forward",), index=3, inputs=CHANGED, largest_score=5.0, rows=2048,
        rows_of=65536, heads=64, form={"out": replace(FORM, strides=(1, 2, 3, 4))},
    ),
    Judged(call="timed", passes=("backward",), index=1, inputs=CHANGED, rows=65536, rows_of=65536, heads=64),
)  # fmt: skip
SOURCE = {"module": "pkg.mine", "sha256": "1a2b3c4" + "f" * 57, "files": "3", "commit": "c" * 40, "changes": "none"}


def record(**changes):
    made = sweeps.job("mine")
    passes = {
        name: replace(one, activity=Traced(sum_us=us, union_us=us - 1, span_us=us + 1, streams=(7, stream)))
        for (name, one), us, stream in zip(made.passes.items(), (268.25, 837.5), (7, 13), strict=True)
    }
    return replace(made, judged=JUDGED, passes=passes, request=replace(made.request, source=SOURCE), **changes)


def test_three_lines_say_what_was_judged():
    assert judged_lines(record()) == [
        "calls: first on normal(0, 1); hard on hard; timed fwd (block 3), timed bwd (block 1) on normal(0, 1), signs "
        "changed",
        "of each: 2,048 of 65,536 rows in 64 heads, scores up to 93.10",
        f"source: 1a2b3c4 (pkg.mine, 3 files), commit {'c' * 40}",
    ]


def test_an_output_that_the_next_forward_overwrites_is_told():
    static = replace(record(), judged=(JUDGED[0], replace(JUDGED[1], overwritten=True)))
    assert judged_lines(static)[0] == (
        "calls: first on normal(0, 1); hard (a later forward overwrites the output) on hard"
    )
    hides = replace(static, judged=(JUDGED[0], replace(JUDGED[1], hides_nan=True)))
    assert judged_lines(hides)[0] == "calls: first on normal(0, 1); hard (it hides a NaN of the inputs) on hard"
    refused = replace(static, judged=(JUDGED[0], replace(JUDGED[1], strides_refused=True)))
    assert judged_lines(refused)[0] == (
        "calls: first on normal(0, 1); hard (its backward refuses a gradient in another layout) on hard"
    )
    kept = replace(static, judged=(JUDGED[0], replace(JUDGED[1], strides_kept=True)))
    assert judged_lines(kept)[0] == (
        "calls: first on normal(0, 1); hard (its backward is wrong for gradients in two layouts in turn) on hard"
    )


def test_an_unknown_value_is_left_out():
    own = record()
    first = replace(JUDGED[0], largest_score=None, heads=0)
    own = replace(own, judged=(first,), passes={}, request=replace(own.request, source={}))
    calls, looked, source = judged_lines(own)
    assert calls == "calls: first on normal(0, 1)"
    assert looked == "of each: all 65,536 rows"
    assert source == "source: attn_exp's own"
    assert judged_lines(replace(own, judged=())) == []


def test_the_page_has_the_lines(tmp_path, monkeypatch, capsys):
    sweeps.write(tmp_path / "multirun" / "first", [record()])
    monkeypatch.chdir(tmp_path)
    assert main(["first"]) == 0
    page = capsys.readouterr().out
    assert "What was judged\ncalls: first on normal(0, 1);" in page
    assert max(map(len, page[page.index("What was judged") :].splitlines()[:7])) <= WIDTH
