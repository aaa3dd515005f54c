"""The arithmetic of bench/pick_proof.py, on made-up times: its measurements take minutes on a GPU."""

import csv
import importlib.util
import random
import sys
from pathlib import Path

import pytest
import sweeps

from attn_exp.core.dispatch_table import Bucket, Choice, DispatchTable, normalised, write_table

PATH = Path(__file__).resolve().parents[1] / "bench" / "pick_proof.py"
TIMES = {
    "long": {"fa3": 100.0, "cudnn": 110.0, "auto": 110.0},
    "decode": {"fa3": 120.0, "cudnn": 100.0, "auto": 100.0, "flash": 99.9},
    "short": {"fa3": 100.0, "cudnn": 104.0, "auto": 100.0},
}


@pytest.fixture(scope="module")
def proof():
    spec = importlib.util.spec_from_file_location("pick_proof", PATH)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def rows(proof, picks, mode="inference", times=TIMES):
    return [
        proof.Row(sweeps.case(), mode, Choice(label=picked, how="nearest", why=""), own)
        for picked, own in zip(picks, times.values(), strict=True)
    ]


def cells(text):
    """The rows of the table of a report, by mode and then by column."""
    head, rule, *lines = text.split("\n\n", 1)[1].splitlines()
    starts = [
        at for at, (before, here) in enumerate(zip(" " + rule, rule, strict=False)) if (before, here) == (" ", "-")
    ]
    split = [[line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)] for line in (head, *lines)]
    return {line[0]: dict(zip(split[0], line, strict=True)) for line in split[1:]}


def test_picks_are_held_against_the_best_of_each_shape_the_best_constant_and_sdpa_s_own_choice(proof):
    text = proof.report(rows(proof, ("fa3", "cudnn", "fa3")) + rows(proof, ("fa3", "cudnn", "cudnn"), "training"))
    one, other = cells(text).values()
    # Always fa3: 1, 120 / 99.9 and 1. Always cudnn, which is better: 1.1, 100 / 99.9, 1.04. Flash was not timed in all.
    assert (one["mode"], one["shapes"], one["fastest picked"]) == ("inference", "3", "2")
    assert (one["slower, geomean"], one["best constant"], one["slower"]) == ("0.03 %", "always cudnn", "4.62 %")
    assert (one["closed"], one["behind auto at most"]) == ("99 %", "0.00 %")
    assert (other["slower, geomean"], other["closed"], other["behind auto at most"]) == ("1.35 %", "70 %", "4.00 %")
    assert other["there"].endswith(": cudnn") and text.startswith("not held: ")


@pytest.mark.parametrize(
    ("picks", "held"),
    [(("fa3", "cudnn", "fa3"), True), (("fa3", "cudnn", "cudnn"), False), (("cudnn", "cudnn", "cudnn"), False)],
)
def test_a_proof_fails_if_the_picks_are_no_better_than_a_constant(proof, picks, held):
    assert proof.report(rows(proof, picks)).startswith("held" if held else "not held")


def test_a_gap_below_one_percent_leaves_nothing_to_close(proof):
    near = {name: {"fa3": 100.0, "cudnn": 100.5, "auto": 100.5} for name in TIMES}
    text = proof.report(rows(proof, ("cudnn",) * 3, times=near))
    (one,) = cells(text).values()
    assert (one["best constant"], one["slower"], one.get("closed", "")) == ("always fa3", "0.00 %", "")
    assert text.startswith("held")


def test_what_may_be_the_best_constant_is_timed_in_every_shape(proof):
    times = ({"fa3": 10.0, "cudnn": 13.0, "flex": 20.0}, {"fa3": 12.0, "cudnn": 10.0, "flex": 20.0, "triton": 9.0})
    buckets = tuple(Bucket(mode="inference", case=sweeps.case(), pick="fa3", times_us=one) for one in times)
    names = ("fa3", "cudnn", "flex", "triton")
    table = DispatchTable(made_by="", fingerprint={}, backends={key: {} for key in names}, buckets=buckets)
    assert proof.constants(table, "inference") == {"fa3", "cudnn"} and proof.constants(table, "training") == set()


def test_decodes_are_among_the_random_shapes_and_lie_between_those_of_the_grid(proof):
    draw = random.Random(proof.SEED)
    cases = [proof.drawn(draw, "cuda") for _ in range(200)]
    decodes = [case for case in cases if case.q_len == 1]
    assert 40 < len(decodes) < 100 and not any(case.causal for case in decodes)
    assert all(256 <= case.kv_len <= 8192 and 16 <= case.batch * case.q_heads <= 64 for case in cases)


def test_todays_picks_are_judged_by_kept_times_and_those_without_a_time_are_counted(proof, tmp_path):
    draw = random.Random(proof.SEED)
    cases = [proof.drawn(draw, "cpu") for _ in range(3)]
    times = {"math": 10.0, "flash": 20.0}
    buckets = tuple(
        Bucket(mode="inference", case=normalised(case), pick="math", times_us=times) for case in dict.fromkeys(cases)
    )
    table = DispatchTable(
        made_by="", fingerprint={"device": "cpu"}, backends={name: {} for name in times}, buckets=buckets
    )
    write_table(table, tmp_path / "table.json")
    with (tmp_path / "pick_proof.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["case", "mode", "flash", "math"])
        writer.writeheader()
        for case, own in zip(cases, ({"flash": 8.0, "math": 10.0}, {"flash": 8.0}, {"math": 9.0}), strict=True):
            writer.writerow({"case": case.label(), "mode": "inference"} | own)
    rows, left_out = proof.kept(tmp_path)
    assert [row.slower() for row in rows] == [1.25, 1.0] and left_out == 1
