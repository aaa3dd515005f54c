"""The answer of a sweep: the fewest rules, by how much, what is open, and nothing from a machine in doubt."""

import itertools
import math
import re
import shlex

import pytest
import sweeps
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_exp import compare
from attn_exp.commands.duel import rivals_of
from attn_exp.compare.brief import tables_in_brief
from attn_exp.compare.pages import page
from attn_exp.compare.render import text_of
from attn_exp.compare.rules import Example, fewest
from attn_exp.compare.standing import standings


@pytest.fixture(autouse=True)
def _state(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_EXP_STATE", str(tmp_path / "state"))


DECIDED = "every case is decided: nothing needs to be measured again"
LENGTHS, BATCHES = (512, 1024, 2048, 4096), (1, 4, 16)


def grid(us, **more):
    """A job for each length, batch and mask; `us` says the time of a backend there, forward; backward 2.5 times it."""
    cases = itertools.product(LENGTHS, BATCHES, (True, False))
    return [
        sweeps.job(name, time, 2.5 * time, of=sweeps.case(seq_len=length, batch=batch, causal=causal), **more)
        for length, batch, causal in cases
        for name, time in us(length, batch, causal).items()
    ]


def answer(tmp_path, records, **keys):
    return compare(sweeps.sweep(tmp_path / "s", records), **keys).answer


def counted(found):
    """In how many passes of an answer one is sure, several are too close, it is undecided, and there is nothing."""
    tallies = found.tallies
    return [sum(sum(one.picks.values()) for one in tallies)] + [
        sum(getattr(one, name) for one in tallies) for name in ("close", "open", "single")
    ]


def test_one_winner_everywhere_is_one_line_as_hyperfine_puts_it(tmp_path):
    def us(length, batch, causal):
        base = length * batch * (1 if causal else 2)
        return {"flash": 1.27 * base, "cudnn": base, "math": 9.0 * base}

    found = answer(tmp_path, grid(us))
    line, done = found.lines()
    assert re.fullmatch(
        r"cudnn is 1\.27 \[95 % CI: 1\.2\d, 1\.[23]\d\] times as fast as the next best, flash "
        r"\(forward 1\.27, backward 1\.27\), 24 of 24 cases in each pass",
        line,
    ), line
    assert done == DECIDED
    # What rows differ by on average is not less than what two equal rows may.
    (rule,) = found.rules
    assert math.log(rule.high / rule.low) / 2 == pytest.approx(math.log(1.01), rel=0.1)


def test_the_winner_of_each_region_is_one_rule(tmp_path):
    def us(length, batch, causal):
        first = length <= 1024 and causal
        return {"flash": 80.0 if first else 100.0, "cudnn": 100.0 if first else 50.0}

    lines = answer(tmp_path, grid(us)).lines()
    assert len(lines) == 4 and lines[-1] == DECIDED
    # The level of the intervals is said once.
    assert [line.count("[95 % CI: ") for line in lines] == [1, 0, 0, 0]
    lines = [line.replace("95 % CI: ", "") for line in lines]
    one = "flash is 1.25 [1.24, 1.26] times as fast as cudnn (forward 1.25, backward 1.25)"
    other = "cudnn is 2.00 [1.98, 2.02] times as fast as flash (forward 2.00, backward 2.00)"
    assert f"seq_len up to 1024, causal: {one}, 6 of 6 cases in each pass" in lines
    assert f"seq_len from 2048: {other}, 12 of 12 cases in each pass" in lines


def test_rows_in_doubt_that_look_best_do_not_split_the_rule_of_what_is_best_beside_them(tmp_path):
    # flash is the fastest everywhere, and unstable at one length of four: no feature of the cases has to do with it.
    records = [
        sweeps.job(name, us, None, of=sweeps.case(seq_len=length),
                   flags=("unstable",) if (name, length) == ("flash", 1024) else ())
        for length in LENGTHS
        for name, us in (("flash", 50.0), ("cudnn", 100.0), ("math", 300.0))
    ]  # fmt: skip
    *lines, doubt, undecided, _ = answer(tmp_path, records).lines()
    assert doubt == "1 of 12 rows decide nothing (1 unstable)"
    said = "flash is 2.00 [95 % CI: 1.98, 2.02] times as fast as the next best, cudnn, surely in 3 of 4 cases"
    assert lines == [f"{said}; undecided in 1: flash (unstable) looks 2.00 times as fast as cudnn"]
    assert undecided == "not decided in 1 of 4 cases (cudnn and flash); to settle it:"
    assert fewest([Example({"n": n}, frozenset("a"), frozenset("b")) for n in (1, 2)])[0].best == {"a"}
    # What is in doubt in half of the cases is no pick.
    halves = [Example({"n": 1}, frozenset("b")), Example({"n": 2}, frozenset("a"), frozenset("b"))]
    assert [part.best for part in fewest(halves)] == [{"b"}, {"a"}]


def test_the_next_best_that_has_no_result_in_some_cases_is_said_to_have_none(tmp_path):
    records = [
        sweeps.job(name, us, None, of=sweeps.case(seq_len=length))
        for length in LENGTHS
        for name, us in (("flash", 50.0), ("cudnn", 100.0), ("math", 300.0))
        if (name, length) != ("cudnn", 4096)
    ]
    failed = sweeps.failed("out_of_memory", "cudnn", of=sweeps.case(seq_len=4096), bwd_us=None)
    line, _ = answer(tmp_path, [*records, failed]).lines()
    times = "flash is 2.00 [95 % CI: 1.98, 2.02] times as fast as the next best, cudnn"
    assert line == f"{times}, 4 of 4 cases (cudnn has no result in 1)"


def test_many_rules_begin_with_a_count_of_who_is_best_where(tmp_path):
    def us(length, batch, causal):
        first = LENGTHS.index(length) % 2 == 0
        return {"flash": 80.0 if first else 100.0, "cudnn": 100.0 if first else 50.0}

    *said, _, _, _, _, _ = answer(tmp_path, grid(us)).lines()
    assert said == ["forward and backward, 24 cases: surely fastest: cudnn in 12, flash in 12"]


def test_masks_of_several_kinds_are_named_by_their_words(tmp_path):
    def lines(*masks):
        records = [
            sweeps.job(name, us, None, of=sweeps.case(**{"causal": True} | mask))
            for mask, *own in masks
            for name, us in zip(("flash", "flex"), own, strict=True)
        ]
        found = compare(sweeps.write(tmp_path / f"{len(masks)}", records))
        return (
            found.answer.said(),
            text_of(page(found), "table"),
            text_of(page(found), "csv").splitlines()[0].split(","),
        )

    kinds = [({"causal": False}, 50.0, 80.0), ({}, 50.0, 80.0)]
    kinds += [({"prefix": 256}, 90.0, 80.0), ({"chunk": 512}, 90.0, 80.0)]
    (chosen, other), table, columns = lines(*kinds)
    assert chosen.startswith("mask causal or full: flash is ")
    assert other.startswith("mask chunked (512) or prefix_lm (256): flex is ")
    assert "prefix_lm (256)  forward" in table and "window" not in table
    # Files have the fields of a case.
    assert {"causal", "window", "prefix", "chunk"} <= set(columns) and "mask" not in columns
    # Of one kind, the number of keys is what differs, and numbers have an order.
    (narrow, wide), *_ = lines(*(({"window": keys}, 50.0 if keys > 99 else 90.0, 80.0) for keys in (32, 64, 128)))
    assert narrow.startswith("window up to 64: flex is ") and wide.startswith("window 128: flash is ")


def test_features_that_coincide_in_the_cases_are_both_named(tmp_path):
    # 32 heads are measured with 64 dimensions alone, and batch and length vary by themselves.
    records = [
        sweeps.job(name, us, None, of=sweeps.case(seq_len=length, q_heads=heads, kv_heads=heads, head_dim=dim,
                                                  value_dim=dim))
        for length in LENGTHS[:2]
        for heads, dim, flash in ((32, 64, 50.0), (16, 128, 200.0))
        for name, us in (("flash", flash), ("cudnn", 100.0))
    ]  # fmt: skip
    assert answer(tmp_path, records).lines() == [
        "q_heads 16 (only with head_dim 128): cudnn is 2.00 [95 % CI: 1.98, 2.02] times as fast as flash, 2 of 2 cases",
        "q_heads 32 (only with head_dim 64): flash is 2.00 [1.98, 2.02] times as fast as cudnn, 2 of 2 cases",
        DECIDED,
    ]


def test_a_pass_is_a_region_too(tmp_path):
    records = [
        sweeps.job(name, *times, of=sweeps.case(seq_len=length))
        for length in LENGTHS
        for name, times in (("flash", (50.0, 300.0)), ("cudnn", (100.0, 200.0)))
    ]
    assert answer(tmp_path, records).lines() == [
        "backward: cudnn is 1.50 [95 % CI: 1.48, 1.52] times as fast as flash, 4 of 4 cases",
        "forward: flash is 2.00 [1.98, 2.02] times as fast as cudnn, 4 of 4 cases",
        DECIDED,
    ]


def test_ties_are_said_with_the_one_command_that_would_settle_them(tmp_path):
    def us(length, batch, causal):
        return {"flash": 100.0, "cudnn": 100.3 if causal else 130.0, "math": 900.0}

    found = answer(tmp_path, grid(us))
    (rule,) = found.rules
    assert (rule.label, rule.over, rule.wins, rule.n) == ("flash", "cudnn", 24, 48)
    *_, said, command = found.lines()
    every = f"attn-exp compare s folder={tmp_path} settle=true"
    largest = f"to settle the one with most at stake, cudnn and flash (all: {every}):"
    assert said == f"not decided in 24 of 48 passes of 24 cases; {largest}"
    assert rivals_of(shlex.split(command)[2:])[0] == {"a": ["backend=cudnn"], "b": ["backend=flash"]}
    assert "\n" not in command


def test_two_names_of_one_kernel_are_shown_as_one(tmp_path):
    from test_compare_doubt import CUDNN, forward, ran

    records = [ran(forward("cudnn", 100.0), CUDNN), ran(forward("auto", 102.5), CUDNN), forward("flash", 130.0)]
    assert answer(tmp_path, records).lines() == [
        "cudnn (same kernel: auto) is 1.30 [95 % CI: 1.29, 1.31] times as fast as flash, 1 of 1 case",
        DECIDED,
    ]


def test_two_names_of_one_kernel_are_one_pick_also_where_a_row_of_one_is_in_doubt(tmp_path):
    from test_compare_doubt import CUDNN, forward, ran

    def of(length, first, second):
        case = sweeps.case(seq_len=length)
        return [
            ran(forward(*first, of=case), CUDNN),
            ran(forward(*second, of=case, flags=("unstable",)), CUDNN),
            forward("flash", 130.0, of=case),
        ]

    records = [*of(1024, ("cudnn", 100.0), ("auto", 99.0)), *of(2048, ("auto", 100.0), ("cudnn", 99.0))]
    (rule, _, _) = answer(tmp_path, records).lines()
    assert rule.endswith(" is 1.30 [95 % CI: 1.29, 1.31] times as fast as flash, 2 of 2 cases")


def test_of_several_rows_in_doubt_the_duel_is_between_the_best_two(tmp_path):
    records = grid(lambda *_: {"flash": 104.0, "cudnn": 60.0, "math": 293.0})
    first = records[0].request.case
    records = [
        sweeps.replace(one, flags=("unstable",))
        if one.request.case == first and one.request.backend["name"] != "math"
        else one
        for one in records
    ]
    *_, command = answer(tmp_path, records).lines()
    assert rivals_of(shlex.split(command)[2:])[0] == {"a": ["backend=cudnn"], "b": ["backend=flash"]}


@pytest.mark.parametrize(("flag", "remedy"), [("busy_host", "while nothing else runs"), ("unstable", "measure longer")])
def test_where_most_rows_are_in_doubt_that_comes_first_and_nothing_is_picked(tmp_path, flag, remedy):
    records = grid(lambda *_: {"flash": 100.0, "cudnn": 50.0}, flags=(flag,))
    found = compare(sweeps.sweep(tmp_path / "s", records))
    (line,) = found.answer.lines()
    assert line.startswith(f"NO PICK: 96 of 96 rows decide nothing (96 {flag}); ") and remedy in line
    for form in ("table", "markdown", "json", "html"):
        assert "NO PICK: 96 of 96 rows" in text_of(page(found), form)
    assert " ".join(text_of(page(found)).split()).startswith("NO PICK")


@pytest.mark.parametrize(
    ("flag", "command", "wanted"),
    [
        ("busy_host", "python -m attn_exp -m batch=1,8 sweep=s", "python -m attn_exp -m batch=1,8 sweep=s-again"),
        ("busy_host", "python -m attn_exp -m batch=1,8 stopping=quick", "... stopping=quick sweep=s-again"),
        ("unstable", "python -m attn_exp -m batch=1,8 stopping=quick", "... stopping=thorough sweep=s-again"),
        ("unstable", "python -m attn_exp -m batch=1,8 stopping.budget_s=1", "... stopping=thorough sweep=s-again"),
        # Its folder is taken; what is no command of ours is not one to paste.
        ("busy_host", "python -m attn_exp -m batch=1,8 folder=here", ""),
        ("busy_host", "rm -rf /", ""),
        ("busy_host", "", ""),
    ],
)
def test_without_a_pick_the_command_is_that_which_measures_again_into_another_sweep(tmp_path, flag, command, wanted):
    records = grid(lambda *_: {"flash": 100.0, "cudnn": 50.0}, flags=(flag,))
    folder = sweeps.write(tmp_path / "s", records)
    (folder / "command.txt").write_text(f"{command}\n")
    found = compare(folder)
    asked = ["once more, as another sweep:", wanted.replace("...", "python -m attn_exp -m batch=1,8")]
    assert found.answer.lines()[1:] == (asked if wanted else [])
    assert page(found).headline.command == (asked[1] if wanted else "")


def test_some_rows_in_doubt_leave_the_rest_a_rule_and_are_counted(tmp_path):
    records = grid(lambda *_: {"flash": 100.0, "cudnn": 50.0, "math": 900.0})
    records[0] = sweeps.replace(records[0], flags=("busy_host",))
    rule, doubt, _ = answer(tmp_path, records).lines()
    assert doubt == "2 of 144 rows decide nothing (2 busy_host)"
    # The row in doubt is surely slower than the pick.
    compared = (
        "2.00 [95 % CI: 1.98, 2.02] times as fast as the next best, flash (mean of 46, forward 2.00, backward 2.00)"
    )
    assert rule == f"cudnn is {compared}, 24 of 24 cases in each pass"


@pytest.mark.parametrize("lengths", [LENGTHS, (4096,)])
def test_what_is_in_doubt_and_looks_faster_is_said_with_the_duel_that_would_settle_it(tmp_path, lengths):
    records = [
        sweeps.job(name, us, None, of=sweeps.case(seq_len=length), flags=("unstable",) if name == "efficient" else ())
        for length in LENGTHS
        for name, us in (("flash", 127.0), ("cudnn", 100.0), ("efficient", 90.0 if length in lengths else 110.0))
    ]
    *rules, warning, undecided, command = answer(tmp_path, records).lines()
    assert warning == "4 of 12 rows decide nothing (4 unstable)"
    if len(lengths) == 4:
        assert rules == ["undecided in 4 cases: efficient (unstable) looks up to 1.11 times as fast as cudnn"]
    else:
        # A pick does not hold where a row in doubt surely beats it: it is open there, and said to be.
        assert rules == [
            # The next is in doubt, and surely slower.
            "seq_len up to 2048: cudnn is 1.10 [95 % CI: 1.09, 1.11] times as fast as the next best, efficient, "
            "3 of 3 cases",
            "seq_len 4096: undecided in 1 case: efficient (unstable) looks 1.11 times as fast as cudnn",
        ]
    found = compare(tmp_path / "s")
    every = f"attn-exp compare s folder={tmp_path} settle=true"
    which = "(cudnn and efficient); to settle it:"
    if len(lengths) == 4:
        which = f"to settle the one with most at stake, cudnn and efficient (all: {every}):"
    assert undecided == f"not decided in {len(lengths)} of 4 cases{'; ' if len(lengths) == 4 else ' '}{which}"
    assert rivals_of(shlex.split(command)[2:])[0] == {"a": ["backend=cudnn"], "b": ["backend=efficient"]}
    assert len(found.ties) == len(lengths) and command == found.ties[0].command
    assert "efficient (unstable)" in tables_in_brief(found, standings(found))


def test_a_row_in_doubt_that_may_be_better_leaves_the_pass_open_and_one_that_is_surely_worse_does_not(tmp_path):
    def said(half, us=104.0):
        records = [
            sweeps.job("cudnn", 100.0, None),
            sweeps.job("flash", 200.0, None),
            sweeps.job("math", us, None, half=half, flags=("unstable",)),
        ]
        found = compare(sweeps.sweep(tmp_path / f"{us}-{half}", records))
        return found, {row.cell.result.label: row.best for row in found.rows}

    def of_both_passes():
        records = [sweeps.job("cudnn", 100.0, 100.0), sweeps.job("flash", 100.1, 100.1)]
        return answer(tmp_path / "both", records).next_step()[0]

    # What is counted is passes, also if it is all of them.
    assert of_both_passes().startswith("not decided in 2 of 2 passes of 1 case; ")
    found, best = said(half=0.01)
    assert counted(found.answer) == [1, 0, 0, 0] and best == {"cudnn": True, "flash": False, "math": False}
    found, best = said(half=0.10)
    # It may be as fast, or slower.
    assert counted(found.answer) == [0, 0, 1, 0] and not any(best.values())
    assert found.answer.lines()[0] == "undecided in 1 case: math (unstable) may be as fast as cudnn"
    found, best = said(half=0.10, us=60.0)
    assert counted(found.answer) == [0, 0, 1, 0] and not any(best.values())


def test_each_pass_is_counted_once_in_tally_rules_and_means_and_sure_picks_come_first(tmp_path):
    """Sure, too close, in doubt and single, each in some lengths of forward and backward."""
    records = [
        sweeps.job(name, *times, of=sweeps.case(seq_len=length, batch=batch), flags=flags)
        for length, batch in itertools.product(LENGTHS, BATCHES)
        for name, times, flags in (
            ("cudnn", (100.0, 250.0), ()),
            ("flash", (100.2 if length == 512 else 50.0 * batch, 500.0), ()),
            ("math", (900.0, 300.0 if length < 4096 else 100.0), ("unstable",) if length >= 2048 else ()),
        )
        if name == "cudnn" or (length, batch) != (512, 16)
    ]
    found = compare(sweeps.sweep(tmp_path / "s", records))
    own = found.answer
    wins, close, is_open, single = counted(own)
    assert min(wins, close, is_open, single) > 0
    assert wins + close + is_open + single == own.n == 2 * len(LENGTHS) * len(BATCHES) == 2 * own.cases
    counts = [(rule.wins, rule.close, rule.open) for rule in own.rules]
    assert tuple(map(sum, zip(*counts, strict=True))) == (wins, close, is_open)
    assert all(sum(count) == rule.n for count, rule in zip(counts, own.rules, strict=True))
    # Means, and MLflow's metrics, count the same picks.
    picks = {(one.direction, label): count for one in own.tallies for label, count in one.picks.items()}
    for best_in in (found.means, standings(found).backends):
        assert {(one.direction, one.label): one.best for one in best_in if one.best} == picks
    *tallies, first = own.said()[:3]
    assert [line.partition(",")[0] for line in tallies] == ["forward", "backward"]
    said = [re.findall(r"(?: in |; |: )(\d+)", line) for line in tallies]
    assert [sum(map(int, numbers)) for numbers in said] == [one.n for one in own.tallies]
    assert first == own.rules[0].sentence(own.metric, level=True)
    rules = own.rules
    order = [rule.order for rule in own.rules]
    assert order == sorted(order) and len(set(order)) > 1
    # Of fewer rules those that are not sure are left out first, and it is said what is.
    (hidden,) = [line for line in own.said(most=1) if line.startswith("...")]
    assert f"... and {len(rules) - 1} more such rules (" in hidden and f"{order.count(2)} undecided)" in hidden


def test_the_duel_to_run_first_is_that_in_which_most_is_at_stake(tmp_path):
    # Of several cases too close to call, and one of 1.5 times whose faster row is in doubt.
    records = [
        sweeps.job(name, us, None, of=sweeps.case(seq_len=length), flags=flags)
        for length in (*LENGTHS, 8192)
        for name, us, flags in (
            ("cudnn", 150.0, ()),
            ("flash", 150.2 if length < 8192 else 300.0, ()),
            ("math", 100.0 if length == 8192 else 900.0, ("unstable",) if length == 8192 else ()),
        )
    ]
    found = compare(sweeps.sweep(tmp_path / "s", records))
    assert len(found.ties) == 5 and found.answer.settle == found.ties[0]
    assert [found.ties[0].a.result.label, found.ties[0].b.result.label] == ["cudnn", "math"]
    assert "seq_len=8192" in found.answer.next_step()[1]


def test_two_of_which_none_is_surely_worse_are_too_close_to_call(tmp_path):
    # In each case another third is as fast, so that no two are best everywhere.
    records = [
        sweeps.job(name, us, None, of=sweeps.case(seq_len=length), half=half)
        for length, other in ((512, "flash"), (1024, "math"))
        for name, us, half in (("cudnn", 100.0, 0.003), (other, 101.0, 0.02))
    ]
    rules = [line for line in answer(tmp_path, records).lines() if line.startswith("cudnn")]
    assert len(rules) == 1 and re.match(
        r"cudnn and (flash|math) are too close to call, 2 cases; cudnn is 1\.01 ", rules[0]
    )


def test_one_backend_alone_and_failures_give_no_rule(tmp_path):
    assert answer(tmp_path, [sweeps.job("flash"), sweeps.failed(backend="math")]).lines() == []


def test_a_case_with_one_result_is_not_said_to_be_decided(tmp_path):
    records = [sweeps.job("flash", 100.0, None), sweeps.job("cudnn", 50.0, None)]
    alone = sweeps.job("flash", 100.0, None, of=sweeps.case(seq_len=512))
    assert answer(tmp_path, records).lines()[-1] == DECIDED
    said = answer(tmp_path, [*records, alone]).lines()[-1]
    assert said == DECIDED.replace("every case", "every case with two results")


def test_a_metric_of_another_kind_is_named(tmp_path):
    records = [sweeps.job("flash", 100.0, None), sweeps.job("cudnn", 50.0, None)]
    line, _ = answer(tmp_path, records, metric="flops_of_measured").lines()
    assert line.startswith("cudnn is 2.00 ") and "better by flops_of_measured than flash, 1 of 1 case" in line


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.booleans(), st.sets(st.sampled_from("abc"), min_size=1)),
        min_size=1, max_size=30, unique_by=lambda one: one[:2],
    )
)  # fmt: skip
def test_rules_are_a_partition_and_each_names_one_of_the_best_of_each_case(drawn):
    examples = [Example({"n": n, "yes": yes}, frozenset(best)) for n, yes, best in drawn]
    parts = fewest(examples)
    assert sorted(at for part in parts for at in part.indices) == list(range(len(examples)))
    for part in parts:
        assert part.best and all(part.best <= examples[at].best for at in part.indices)
        # The values single out exactly these examples.
        chosen = [
            at
            for at, one in enumerate(examples)
            if all(one.features[name] in values for name, values in part.where.items())
        ]
        assert tuple(chosen) == tuple(sorted(part.indices))
    assert len(parts) == 1 or not frozenset.intersection(*(one.best for one in examples))


def test_a_rule_without_an_interval_has_an_empty_cell(tmp_path):
    # All rows of the other backend are unstable: nothing is next.
    jobs = grid(lambda length, batch, causal: {"flash": 100.0})
    doubtful = [
        sweeps.job("math", of=sweeps.case(seq_len=length, batch=1, causal=True), half=0.5) for length in LENGTHS
    ]
    found = compare(sweeps.sweep(tmp_path / "s", jobs + doubtful))
    sheets = {sheet.name: sheet for sheet in page(found).sheets}
    texts = sheets["answer"].texts()
    without = [text for text, rule in zip(texts, found.answer.rules, strict=True) if rule.low is None]
    assert without and all(text["95 %"] == "" != text["where"] for text in without)
