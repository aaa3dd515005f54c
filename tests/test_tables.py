"""What all tables share: figures, and grids that fit."""

import csv
import io
from dataclasses import replace

import pytest
import sweeps
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from attn_exp.core.errors import UserError
from attn_exp.core.record.metrics import metric_named
from attn_exp.core.sheet.render import fitted
from attn_exp.core.sheet.sheet import sheet_of
from attn_exp.core.text import figures
from attn_exp.results.result import result_of
from attn_exp.results.table import check_columns, csv_text, job_line, table

texts = st.text(alphabet="abc .1230+-%<>[],", max_size=12).map(str.strip) | st.none()
names_of_columns = (
    st.text(alphabet="abcd_ ", min_size=1, max_size=14).map(lambda name: " ".join(name.split())).filter(bool)
)
heads = st.lists(names_of_columns, min_size=1, max_size=6, unique=True)


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (0.000123456, "0.000123"), (0.02495, "0.02495"), (9.632, "9.632"), (1234.5, "1234")]
)
def test_figures_have_four_digits_and_no_exponent(value, text):
    assert figures(value) == text


@settings(max_examples=200)
@given(st.data(), heads, st.integers(10, 60))
def test_a_grid_is_as_wide_as_was_reckoned_and_leaves_out_no_more_than_it_must(data, names, width):
    rows = data.draw(st.lists(st.fixed_dictionaries(dict.fromkeys(names, texts)), min_size=1, max_size=5))

    def grid(shown):
        return fitted(sheet_of([{name: row[name] for name in shown} for row in rows]), 1000)[0]

    names = [name for name in names if any(row[name] for row in rows)]
    assume(names)
    rows = [{name: row[name] for name in names} for row in rows]
    text, left_out = fitted(sheet_of(rows, names[1:]), width)
    kept = [name for name in names if name not in left_out]
    assert text == grid(kept)
    assert left_out == names[1 : 1 + len(left_out)]
    assert len(kept) == 1 or len(left_out) == len(names[1:]) or max(map(len, text.splitlines())) <= width
    if left_out:
        one_more = [name for name in names if name not in left_out[:-1]]
        assert max(map(len, grid(one_more).splitlines())) > width


def test_a_swept_key_is_the_last_column_to_go():
    rows = [
        result_of(sweeps.job("flash", us, measuring={"timer": timer})) for us, timer in ((9, "device"), (8, "event"))
    ]
    for width in range(40, 121, 10):
        text = table(rows, width=width)
        assert " device " in text and " event " in text, width


def asked(block):
    request = sweeps.job("triton").request
    return replace(request, backend={**request.backend, "block": block})


def test_rows_of_one_backend_with_unlike_options_are_told_apart():
    rows = [result_of(replace(sweeps.job("triton"), request=asked(block))) for block in (64, 128)]
    text, lines = table(rows), csv_text(rows).splitlines()
    assert "triton(block=64)" in text and "triton(block=128)" in text
    assert {row["label"] for row in csv.DictReader(lines)} == {"triton(block=128)", "triton(block=64)"}
    assert " block=64  " in job_line(rows[0], ("block", "absent"))
    assert "block" not in table(rows[:1])


def test_ways_of_measuring_stand_above_a_table_or_tell_its_rows_apart_and_are_in_the_csv():
    one = result_of(sweeps.job("flash", 100.0))
    text = table([one])
    assert "timer device, regime sustained, l2 cold, device cuda" in " ".join(text.split())
    assert "seed" not in text, "one seed for all is in the CSV"
    burst = result_of(sweeps.job("flash", 90.0, measuring={"regime": "burst", "seed": 7}))
    assert "seed" in table([one, burst])
    lines = [line.split() for line in table([one, burst]).splitlines()]
    assert sorted(word for line in lines for word in line if word in ("sustained", "burst")) == ["burst", "sustained"]
    fresh = replace(one, caches=False)
    assert "flash(caches=false)" in table([one, fresh]) and "flash(caches=true)" in table([one, fresh])
    assert "embed_dim 2048" in " ".join(text.split())
    (row,) = csv.DictReader(io.StringIO(csv_text([burst])))
    assert row["embed_dim"] == "2048"
    assert (row["regime"], row["l2"], row["caches"], row["seed"]) == ("burst", "cold", "True", "7")


def test_the_model_of_too_wide_a_row_stands_for_what_it_says():
    grouped = replace(sweeps.CASE, kv_heads=4, head_dim=64, value_dim=64)
    rows = [result_of(sweeps.job()), result_of(sweeps.job(of=grouped, model="other"))]
    wide, narrow = table(rows, width=200), table(rows, width=100)
    assert {"value", "other"} <= set(wide.split())
    assert "omitted to fit the width: value_dim, head_dim" in narrow and "other" in narrow.split("omitted")[0]
    # Nor does it if rows of one model differ.
    unlike = [*rows, result_of(sweeps.job(of=replace(grouped, kv_heads=8), model="other"))]
    assert "kv_heads" not in table(unlike, width=100).split("omitted")[1].split(";")[0]


def test_more_columns_are_in_the_table_when_they_are_asked_for():
    records = [sweeps.job("flash", 100.0), sweeps.job("cudnn", 80.0), sweeps.failed(backend="math")]
    powered = {"forward/joules_per_call": 0.0625, "forward/workspace_bytes": 4096.0, "forward/kernel_time_us": 95.5}
    records[0] = replace(records[0], metrics=records[0].metrics | powered)
    results = [result_of(record) for record in records]
    assert "joules" not in table(results)
    asked = ("joules_per_call", "workspace_bytes", "kernel_time_us")
    text = table(results, columns=asked)
    # Words of a head stand below each other.
    for word in ("joules", "call", "workspace", "kernel", "0.06250", "4096", "95.50"):
        assert word in text.split(), text
    assert "no job has" not in text
    assert "no job has power_w: attn-exp explain says why" in table(results, columns=("power_w",))


def test_the_head_of_a_timers_column_names_the_timer():
    assert metric_named("event_time_us").head == "event time us"


@pytest.mark.parametrize("columns", [["joules"], "power", [7], [None]])
def test_columns_that_are_no_metrics_are_refused(columns):
    with pytest.raises(UserError, match=r"is no list of metrics, which are time_us, .*: columns=\[gb_per_s\]"):
        check_columns(columns)
    assert check_columns(["joules_per_call", "error_dq", "event_time_us"]) == (
        "joules_per_call",
        "error_dq",
        "event_time_us",
    )
    assert check_columns([]) == ()
