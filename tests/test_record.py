import json
import os
import random
from dataclasses import replace

import msgspec
import pytest
from fakes import make_record, make_request, make_timing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import cases

from attn_exp.core.errors import RecordError
from attn_exp.core.files import hidden_files, owner_mark, remove_litter
from attn_exp.core.host.process import pid_namespace
from attn_exp.core.record.file import FILE_NAME, read_record, write_record
from attn_exp.core.record.record import SCHEMA, Record
from attn_exp.core.record.status import STATUSES

# Control characters and surrogates are no text of a record.
_KEPT = st.characters(exclude_categories=("Cc", "Cf", "Cs"), include_characters="\n\t")
WORDS, LETTERS = st.text(_KEPT), st.text(_KEPT, max_size=5)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cases(),
    st.sampled_from(list(STATUSES)),
    st.lists(st.floats(1e-3, 1e9), max_size=20),
    WORDS,
    st.dictionaries(LETTERS, st.none() | st.booleans() | WORDS | st.integers(0, 2**53), max_size=4),
)
def test_any_record_reads_back_as_it_was_written(tmp_path, case, status, times, reason, environment):
    passes = {"backward": replace(make_record().passes["forward"], timings=(make_timing(times),))}
    request = make_request(case=case)
    record = make_record(request=request, status=status, reason=reason, passes=passes, environment=environment)
    write_record(record, tmp_path)
    assert read_record(tmp_path) == record


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b"\xff\xfe"])
def test_a_file_that_is_no_record_is_told_apart_by_name(tmp_path, content):
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(RecordError, match=FILE_NAME):
        read_record(tmp_path)


def test_a_record_cut_short_anywhere_is_no_record(tmp_path):
    write_record(make_record(), tmp_path)
    whole = (tmp_path / FILE_NAME).read_bytes()
    for length in random.Random(7).sample(range(len(whole)), 100):
        (tmp_path / FILE_NAME).write_bytes(whole[:length])
        with pytest.raises(RecordError):
            read_record(tmp_path)


def damaged(tmp_path, change):
    write_record(make_record(), tmp_path)
    tree = json.loads((tmp_path / FILE_NAME).read_bytes())
    change(tree)
    (tmp_path / FILE_NAME).write_text(json.dumps(tree))
    return tmp_path


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree.update(status="fine"),
        lambda tree: tree.update(metrics={"forward/time_us": None}),
        lambda tree: tree["request"].pop("case"),
        lambda tree: tree["request"]["case"].update(kv_heads=5),  # what a case itself refuses
        lambda tree: tree["passes"]["forward"]["timings"][0].update(times_us=[1.0, None]),
    ],
)
def test_a_record_of_another_shape_is_no_record(tmp_path, change):
    with pytest.raises(RecordError, match=FILE_NAME):
        read_record(damaged(tmp_path, change))


def test_another_schema_is_said_to_be_one(tmp_path):
    with pytest.raises(RecordError, match=f"has schema {SCHEMA + 1}, this version reads {SCHEMA}"):
        read_record(damaged(tmp_path, lambda tree: tree.update(schema=SCHEMA + 1)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_never_holds_nan(tmp_path, value):
    write_record(make_record(telemetry=({"power_w": value},)), tmp_path)
    text = (tmp_path / FILE_NAME).read_text()

    def refuse(constant):
        raise AssertionError(f"{constant} in JSON")

    assert json.loads(text, parse_constant=refuse)["telemetry"] == [{"power_w": None}]


def test_a_reason_with_a_name_that_is_no_utf8_is_kept(tmp_path):
    name = os.fsdecode(b"/data/\xe9t\xe9.pt")
    write_record(make_record(status="error", reason=f"no such file: {name}", telemetry=({name: name},)), tmp_path)
    record = read_record(tmp_path)
    assert record.reason == "no such file: /data/?t?.pt"
    assert record.telemetry == ({"/data/?t?.pt": "/data/?t?.pt"},)


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    write_record(make_record(status="error", reason="first"), tmp_path)

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("attn_exp.core.files.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_record(make_record(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    assert read_record(tmp_path).reason == "first"


def test_statuses_are_the_closed_set_and_what_another_try_may_change_is_not_final():
    assert set(STATUSES) == {"ok", "unsupported", "unavailable", "wrong_kernel", "inaccurate", "nondeterministic",
                             "implausible", "out_of_memory", "timeout", "crashed", "error"}  # fmt: skip
    retried = {status for status in STATUSES if not make_record(status=status).final}
    assert retried == {"implausible", "unavailable", "timeout", "crashed", "error"}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(msgspec.to_builtins(make_record()) | {"status": "fine"}, Record)


def test_litter_of_a_process_that_is_gone_goes_wherever_it_lies_and_no_other(tmp_path):
    gone, elsewhere = (f"@{host}@{pid_namespace()}.{2**22 + 1}@" for host in (os.uname().nodename, "elsewhere"))
    places = (tmp_path, tmp_path / "job", tmp_path / "job" / "profiles")
    places[-1].mkdir(parents=True)
    for place in places:
        for owner in (gone, owner_mark(), elsewhere):
            (place / f".record.json{owner}").touch()
    remove_litter(hidden_files(tmp_path))
    left = [path.name for place in places for path in place.glob(".*")]
    assert sorted(left) == sorted([f".record.json{owner_mark()}", f".record.json{elsewhere}"] * 3)
