"""`attn-exp pick`: which backend a table picks where, and what it refuses."""

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import sweeps
from inprocess import typed

from attn_exp.comparison.picks import pick
from attn_exp.core.dispatch_table import Chooser, read_table, write_table
from attn_exp.core.errors import UserError
from attn_exp.core.record.request import Compile

ROOT = Path(__file__).resolve().parent.parent


def records(lengths=(512, 1024, 2048, 4096, 8192, 16384), **more):
    """cudnn is the faster the longer, flash wins below 2,048; both pay 8 us for a call."""
    made = []
    for length in lengths:
        of = sweeps.case(seq_len=length, **more)
        work = length * length / 4e4
        made.append(sweeps.job("flash", 8 + work, 2.5 * work, of=of))
        made.append(sweeps.job("cudnn", 30 + 0.7 * work, 2 * work, of=of))
    return made


@pytest.fixture
def sweep(tmp_path):
    def written(made, name="s"):
        return sweeps.sweep(tmp_path / name, made)

    return written


@pytest.fixture
def call(monkeypatch, tmp_path):
    return typed(monkeypatch, tmp_path)


def by_length(table, mode="inference"):
    return {bucket.case.q_len: bucket for bucket in table.buckets if bucket.mode == mode}


def test_each_measured_shape_has_its_fastest_backend_with_margin_and_hashes(sweep):
    read = sweep(records())
    table = pick([read]).table
    assert {length: bucket.pick for length, bucket in by_length(table).items()} == {
        512: "flash", 1024: "flash", 2048: "cudnn", 4096: "cudnn", 8192: "cudnn", 16384: "cudnn",
    }  # fmt: skip
    bucket = by_length(table)[16384]
    assert bucket.undecided == () and bucket.margin.over == "flash"
    assert bucket.margin.low < bucket.margin.times < bucket.margin.high
    assert bucket.margin.times == pytest.approx(bucket.times_us["flash"] / bucket.times_us["cudnn"])
    jobs = {result.job: hashlib.sha256(result.path.read_bytes()).hexdigest() for result in read.results}
    assert set(bucket.records) < set(jobs) and all(jobs[job] == sha for job, sha in bucket.records.items())


def test_training_is_decided_by_forward_and_backward_together_or_by_their_step(sweep):
    # flash's forward is faster, its backward is slower by more.
    made = [sweeps.job("flash", 100.0, 300.0), sweeps.job("cudnn", 120.0, 250.0)]
    table = pick([sweep(made)]).table
    assert {bucket.mode: bucket.pick for bucket in table.buckets} == {"inference": "flash", "training": "cudnn"}
    training = next(bucket for bucket in table.buckets if bucket.mode == "training")
    assert training.times_us == {"flash": 400.0, "cudnn": 370.0}
    assert training.halves["flash"] < training.halves["cudnn"] + 0.01 < 0.02
    both = [
        replace(one, metrics=one.metrics | {f"step/time{of}_us": us for of in ("", "_low", "_high")})
        for one, us in zip(made, (350.0, 390.0), strict=True)
    ]
    asked = [
        replace(one, request=replace(one.request, measuring=replace(one.request.measuring, passes=("step",))))
        for one in both
    ]
    stepped = [
        replace(one, metrics={key: us for key, us in one.metrics.items() if key.startswith("step")}, passes={})
        for one in asked
    ]
    (bucket,) = pick([sweep(stepped, "steps")]).table.buckets
    assert (bucket.mode, bucket.pick, bucket.times_us) == ("training", "flash", {"flash": 350.0, "cudnn": 390.0})


def test_the_least_upper_bound_of_a_tie_is_picked_and_the_tie_is_named(sweep):
    close = [sweeps.job("flash", 100.0, 250.0), sweeps.job("cudnn", 100.3, 250.5)]
    bucket = by_length(pick([sweep(close)]).table)[1024]
    assert (bucket.pick, bucket.undecided) == ("flash", ("cudnn", "flash"))
    wide = [sweeps.job("flash", 99.0, 249.0, half=0.1), sweeps.job("cudnn", 100.3, 250.5), sweeps.job("math", 400.0)]
    bucket = by_length(pick([sweep(wide, "t")]).table)[1024]
    assert (bucket.pick, bucket.undecided) == ("cudnn", ("cudnn", "flash"))
    assert bucket.margin.over == "math" and bucket.margin.low > 1


def test_forwards_that_save_nothing_for_a_backward_decide_about_inference(sweep):
    alone = [sweeps.job("flash", 90.0, None), sweeps.job("cudnn", 80.0, None)]
    made = [sweeps.job("flash", 100.0, 250.0), sweeps.job("cudnn", 130.0, 250.0), *alone]
    bucket = by_length(pick([sweep(made)]).table)[1024]
    assert bucket.pick == "cudnn" and bucket.times_us == {"flash": 90.0, "cudnn": 80.0}


def test_a_case_that_no_model_calls_is_left_out_and_named(sweep):
    made = [
        *records((512, 1024)),
        sweeps.job("flash", 1.0, 1.0, compile=Compile(mode="default")),
        sweeps.job("flash", 1.0, 1.0, of=sweeps.case(window=64)),
        sweeps.job("flash", 1.0, 1.0, options={"deterministic": True}),
        sweeps.job("mine", 1.0, 1.0, options={"_target_": "theirs.Mine"}),
    ]
    made.append(sweeps.job("compiled", 1.0, 1.0, options={"_target_": "attn_exp.backends.compiled.Compiled"}))
    picked = pick([sweep(made)])
    assert "flash" in by_length(picked.table)[512].times_us
    assert {label for bucket in picked.table.buckets for label in bucket.times_us} == {"flash", "cudnn"}
    said = "\n".join(picked.notes)
    for why in (
        "mask=window",
        "no function of q, k and v",
        "does not come with",
        "compiled by themselves",
        "deterministic",
    ):
        assert why in said


def test_another_shape_gets_the_pick_of_the_nearest_ones(sweep):
    table = pick([sweep(records())]).table
    chooser = Chooser(table)
    short = chooser.choice(sweeps.case(seq_len=700), "inference")
    long = chooser.choice(sweeps.case(seq_len=6000), "inference")
    assert (short.label, short.how, long.label, long.how) == ("flash", "nearest", "cudnn", "nearest")
    beyond = chooser.choice(sweeps.case(seq_len=65536), "inference")
    assert (beyond.label, beyond.how) == ("cudnn", "nearest") and "q_len 65536 (measured up to 16384)" in beyond.why
    other = chooser.choice(sweeps.case(dtype="float16"), "inference")
    assert other.label is None and "float16" in other.why
    assert chooser.choice(sweeps.case(window=64), "inference").why == "a dispatch table has no case with mask=window"
    assert Chooser(table, ["flash"]).choice(sweeps.case(seq_len=16384), "inference").label == "flash"


def test_what_wins_at_one_shape_by_little_and_loses_at_the_next_by_much_is_not_picked_between_them(sweep):
    times = {"flash": (50.0, 130.0), "cudnn": (54.0, 85.0)}
    made = [
        sweeps.job(name, us, us, of=sweeps.case(seq_len=length))
        for name, own in times.items()
        for length, us in zip((512, 1024), own, strict=True)
    ]
    chooser = Chooser(pick([sweep(made)]).table)
    for length, picked in ((512, "flash"), (640, "cudnn"), (1024, "cudnn")):
        assert chooser.choice(sweeps.case(seq_len=length), "inference").label == picked


def test_all_four_corners_of_a_cell_of_lengths_and_batch_sizes_decide(sweep):
    times = {"flash": {512: 50.0, 1024: 130.0}, "cudnn": {512: 52.0, 1024: 100.0}}
    made = [
        sweeps.job(name, us, us, of=sweeps.case(seq_len=length, batch=batch))
        for name, own in times.items()
        for length, us in own.items()
        for batch in (1, 4)
    ]
    between = Chooser(pick([sweep(made)]).table).choice(sweeps.case(seq_len=700, batch=2), "inference")
    assert between.why.count("s512") == between.why.count("s1024") == 2
    assert between.label == "cudnn"


def test_a_backend_that_was_not_measured_at_the_second_shape_may_be_picked(sweep):
    made = [sweeps.job(name, us, us, of=sweeps.case(seq_len=1024)) for name, us in (("cudnn", 100.0), ("flash", 300.0))]
    made.append(sweeps.job("flash", 900.0, 900.0, of=sweeps.case(seq_len=8192)))
    assert Chooser(pick([sweep(made)]).table).choice(sweeps.case(seq_len=1032), "inference").label == "cudnn"


def test_the_command_writes_a_table_that_is_read(sweep, call, tmp_path):
    sweep(records())
    code, out, err = call("pick", "s", f"folder={tmp_path}", "out=t.json")
    assert code == 0, err
    assert "NVIDIA H200" in out and "inference, 6 shapes: cudnn in 4, flash in 2" in out
    assert "t.json is written" in err
    table = read_table(tmp_path / "t.json")
    assert table.fingerprint["torch"] == "2.11.0" and table.fingerprint["driver"] == "580.1"
    assert "pick s" in table.made_by


def test_a_table_of_decoding_is_asked_by_a_call_of_one_query(sweep):
    """A kernel measured bottom-right under a causal mask is that of a call without one."""
    decoding = sweeps.case(batch=4, q_len=1, kv_len=4096, causal=True)
    made = [sweeps.job(name, us, None, of=decoding) for name, us in (("flash", 50.0), ("cudnn", 40.0))]
    chooser = Chooser(pick([sweep(made)]).table)
    asked = replace(decoding, causal=False)
    assert (chooser.choice(asked, "inference").label, chooser.choice(asked, "inference").how) == ("cudnn", "measured")
    assert chooser.choice(replace(asked, kv_len=3000), "inference").how == "nearest"


def test_an_engine_gets_every_case_and_backend_and_reads_them_without_torch(sweep, call, tmp_path):
    paged = [sweeps.case(batch=batch, q_len=1, kv_len=4096, causal=True, page_size=16) for batch in (1, 32)]
    times = {"flashinfer": 100.0, "fa3": 150.0}
    made = [sweeps.job(name, us, None, of=one) for one in paged for name, us in times.items()]
    made = [replace(one, metrics=one.metrics | {"forward/event_time_us": 170.0}) for one in made]
    sweep(made, "serving")
    out = tmp_path / "picks.json"
    code, _, err = call("pick", "serving", "target=json", f"out={out}", f"folder={tmp_path}")
    assert code == 0, err
    whole = json.loads(out.read_text())
    assert (whole["schema"], whole["version"]) == ("attn_exp.picks", 1)
    assert [cell["case"]["page_size"] for cell in whole["cells"]] == [16, 16]
    # The order may differ with the host's part.
    assert whole["cells"][0]["timers_us"] == {"device": times, "event": dict.fromkeys(times, 170.0)}
    loader = ROOT / "examples" / "load_picks.py"
    ran = subprocess.run(
        [sys.executable, "-I", loader, out, "batch=24", "kv_len=8192", *["page_size=16", "causal=true", "window=null"]],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ran.stdout == "flashinfer, 1.50 x as fast as fa3: measured at [32, 1, 4096]\n"
    with pytest.raises(UserError, match="is not a dispatch table"):
        read_table(out)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["pick", "s", "target=vllm"], "target=vllm"),
        (["pick", "s", "backends=triton"], "no record is of triton: the backends are cudnn, flash"),
        (["pick", "s", "out=."], "out=. is a folder"),
        (["pick", "s", "out=none/t.json"], "cannot write none/t.json"),
        (["pick", "failed"], "failed has no record that is ok"),
        (["pick", "windows"], "nothing to pick from (1 records are not in the table: mask=window"),
        (["pick", "two"], "several environments (gpu NVIDIA H"),
        (["pick", "empty"], "empty has no records yet"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_and_leaves_no_file(sweep, call, tmp_path, words, said):
    sweep(records((512,)))
    sweep([sweeps.failed()], "failed")
    sweep([sweeps.job(of=sweeps.case(window=64))], "windows")
    sweep([sweeps.job(), sweeps.job("cudnn", environment=sweeps.H200 | {"gpu": "NVIDIA H100"})], "two")
    (tmp_path / "empty").mkdir()
    code, _, err = call(*words, f"folder={tmp_path}")
    assert code == 2 and said in err and err.count("\n") == 1
    assert not (tmp_path / "table.json").exists()


def test_a_package_that_was_installed_in_between_counts_for_the_backends_that_call_it(sweep):
    """FlexAttention's own kernels are torch's."""
    there = sweeps.H200 | {"versions": sweeps.H200["versions"] | {"flash-attn-4": "4.0.0"}}

    def picked(name, target):
        options = {"options": {"_target_": f"attn_exp.backends.{target}"}}
        later = sweeps.job(name, of=sweeps.case(seq_len=2048), environment=there, **options)
        return pick([sweep([sweeps.job(name, **options), later], name)]).table.buckets

    assert picked("flex", "flex.Flex")
    with pytest.raises(UserError, match="several environments"):
        picked("fa4", "fa4.FlashAttention4")


def test_tables_that_are_edited_foreign_or_of_another_schema_are_refused(sweep, tmp_path):
    path = tmp_path / "t.json"
    write_table(pick([sweep(records((512,)))]).table, path)
    text = path.read_text()
    whole = msgspec.json.decode(text)
    assert read_table(path).buckets[0].pick == "flash"
    # Whitespace is no content.
    path.write_bytes(msgspec.json.encode(whole))
    assert read_table(path).buckets[0].pick == "flash"

    def edited(**changes):
        return msgspec.json.encode(whole | changes).decode()

    for content, said in {
        text.replace('"pick": "flash"', '"pick": "cudnn"', 1): "its hash does not fit",
        edited(schema=99): "has schema 99, and this version reads 1",
        edited(schema="2\n3"): r"has schema '2\\n3', and this version reads 1",
        edited(sha256=None): "its hash does not fit",
        "[]": "is not a dispatch table",
        "{}": "is not a dispatch table",
        text[:-20]: "is not a dispatch table",
        text.replace('"halves": {', '"halves": {"x": NaN, ', 1): "is not a dispatch table",
    }.items():
        path.write_text(content)
        with pytest.raises(UserError, match=said) as refused:
            read_table(path)
        assert "attn-exp pick SWEEP out=" in str(refused.value)
    with pytest.raises(UserError, match="cannot be read"):
        read_table(tmp_path / "none.json")
