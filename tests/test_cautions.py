"""What flags of rows mean for the picks that rest on them, in each place that shows an answer."""

import shlex

import sweeps
from test_takeaway import DECIDED, answer

from attn_exp import compare
from attn_exp.commands.duel import rivals_of
from attn_exp.compare.brief import answer_in_brief
from attn_exp.compare.pages import page
from attn_exp.compare.render import text_of


def launched(name, us, event_us, **more):
    """A forward that takes `us` on the GPU, and `event_us` with its launch."""
    made = sweeps.job(name, us, None, **more)
    return sweeps.replace(made, metrics=made.metrics | {"forward/event_time_us": event_us})


def test_launch_bound_rows_say_whether_the_pick_holds_where_each_call_is_launched(tmp_path):
    flag = {"flags": ("launch_bound",)}

    def said(name, cudnn_event, **more):
        records = [launched("cudnn", 8.0, cudnn_event, **flag), launched("flash", 10.0, 20.0, **more)]
        return compare(sweeps.sweep(tmp_path / name, records))

    rule, holds, done = said("stays", 19.0).answer.lines()
    what = "1 of 1 picks are launch_bound and hold in a CUDA graph; where the CPU launches each call"
    assert rule.startswith("cudnn is 1.25 [") and done == DECIDED
    assert holds == f"{what} (event_time_us) they stay"
    found = said("moves", 30.0)
    _, moves, command, _ = found.answer.lines()
    assert moves == f"{what} (event_time_us) the fastest is flash in 1:"
    assert command == f"attn-exp compare moves folder={tmp_path} metric=event_time_us"
    # Every place shows it, and the command does what it says.
    for form in ("table", "markdown", "json", "html"):
        assert " ".join(what.split()) in " ".join(text_of(page(found), form).split())
    assert what in answer_in_brief(found) and command in answer_in_brief(found)
    (now, *_) = compare(tmp_path / "moves", metric="event_time_us").answer.lines()
    assert now.startswith("flash is 1.50 [")
    # With launches it is no caution, nor where it is of another row than the best two.
    assert len(compare(tmp_path / "moves", metric="event_time_us").answer.lines()) == 2
    third = [sweeps.job("cudnn", 8.0, None), sweeps.job("flash", 10.0, None), launched("math", 90.0, 99.0, **flag)]
    assert compare(sweeps.sweep(tmp_path / "third", third)).answer.cautions == ()


def test_a_pick_of_two_rows_at_different_clocks_says_so_with_the_duel(tmp_path):
    records = [sweeps.job("cudnn", 50.0, None), sweeps.job("flash", 100.0, None, flags=("thermal", "clock_low"))]
    _, said, command, done = answer(tmp_path, records).lines()
    assert said == (
        "in 1 of 1 picks one of the best two was measured at another clock (clock_low 1, thermal 1); "
        "a duel runs both at the same one:"
    )
    assert rivals_of(shlex.split(command)[2:])[0] == {"a": ["backend=cudnn"], "b": ["backend=flash"]}
    assert done == DECIDED
    # What both have in common moves neither, and memory has no clock.
    both = [sweeps.replace(record, flags=("thermal",)) for record in records]
    assert compare(sweeps.sweep(tmp_path / "both", both)).answer.cautions == ()
    assert answer(tmp_path, records, metric="peak_memory_bytes").cautions == ()
