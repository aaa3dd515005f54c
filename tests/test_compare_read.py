"""Reading sweeps for comparing: the same numbers as the whole record, and a sentence for what is none."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import sweeps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import cases

from attn_exp import compare
from attn_exp.core.errors import RecordError, UserError
from attn_exp.core.record import SCHEMA
from attn_exp.core.record_file import FILE_NAME, read_record, write_record
from attn_exp.core.request import Compile
from attn_exp.results.read import read_folder, sweep_folders
from attn_exp.results.result import decode, named

# Of one line, as core/soundness.py demands.
NAMES = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), max_size=8)


def lean(folder, record):
    write_record(record, folder)
    path = folder / FILE_NAME
    return decode(path.read_bytes(), path)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases(), st.dictionaries(NAMES, st.just(0.0) | st.floats(1e-99, 1e12), max_size=5), st.floats(1, 2e9))
def test_a_result_says_what_the_whole_record_says(tmp_path, case, metrics, finished):
    timed = {f"{name}/time_us": 100.0 for name in ("forward", "backward")}
    record = sweeps.job(
        of=case, metrics=metrics | timed, finished_at=finished, canaries={"copy": 480.0}, flags=("drift",)
    )
    result = lean(tmp_path, record)
    whole = result.record()
    assert whole == read_record(tmp_path)
    assert (result.case, result.measuring) == (case, whole.request.measuring)
    # An option that is younger than such records.
    assert result.backend == {"deterministic": False} | whole.request.backend
    assert (result.metrics, result.flags, result.environment) == (whole.metrics, whole.flags, whole.environment)
    assert (result.status, result.reason, result.finished_at) == (whole.status, whole.reason, whole.finished_at)
    assert (result.canaries, result.device_name, result.l2) == (whole.canaries, whole.device_name, "cold")
    assert result.kernels == {"forward": ("flash_forward",), "backward": ("flash_backward",)}
    assert (result.longest_kernel("forward"), result.final, result.profiles) == ("flash_forward", True, ())
    assert result.label == whole.label == "flash"


def test_a_record_without_canaries_is_one_of_before_there_were_any(tmp_path):
    write_record(sweeps.job(), tmp_path)
    tree = json.loads((tmp_path / FILE_NAME).read_bytes())
    del tree["canaries"]
    (tmp_path / FILE_NAME).write_text(json.dumps(tree))
    assert decode((tmp_path / FILE_NAME).read_bytes(), tmp_path / FILE_NAME).canaries == {}
    assert read_record(tmp_path).canaries == {}


@pytest.mark.parametrize("content", [b"", b"{}", b"null", b"\xff\xfe", b'{"schema": 1}', b'{"status": "ok"}'])
def test_what_is_no_record_is_named(tmp_path, content):
    with pytest.raises(RecordError, match=f"{FILE_NAME} is not a record"):
        decode(content, tmp_path / FILE_NAME)


@pytest.mark.parametrize("other", ['{"schema": 7}', '{"schema": 7, "request": {"job": "j"}, "status": "great"}'])
def test_a_record_of_another_schema_says_so_whatever_its_shape(tmp_path, other):
    with pytest.raises(RecordError, match=f"has schema 7, this version reads {SCHEMA}"):
        decode(other.encode(), tmp_path / FILE_NAME)


def test_files_that_are_no_records_are_skipped_and_named(tmp_path):
    folder = sweeps.write(tmp_path / "s", [sweeps.job(), sweeps.job("cudnn")])
    whole = next(folder.glob("flash-*")) / FILE_NAME
    (folder / "cut").mkdir()
    (folder / "cut" / FILE_NAME).write_bytes(whole.read_bytes()[:1000])
    (folder / "empty").mkdir()  # a job that runs just now
    (folder / "table.txt").write_text("")
    found = read_folder(folder)
    assert {result.label for result in found.results} == {"flash", "cudnn"}
    (sentence,) = found.broken
    assert "cut/record.json is not a record" in sentence
    assert "\n" not in sentence


def test_sweeps_are_found_by_name_pattern_and_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for index, name in enumerate(("night-2", "night-1", "other")):
        os.utime(sweeps.write(tmp_path / "multirun" / name, [sweeps.job()]), (index, index))
    names = [path.name for path in sweep_folders(["night-*", "other", "multirun/other", "night-1"])]
    assert names == ["night-2", "night-1", "other"]
    assert sweep_folders([str(tmp_path / "multirun" / "other")]) == [tmp_path / "multirun" / "other"]
    with pytest.raises(UserError, match="there is no sweep 'nigth-1': did you mean 'night-1'"):
        sweep_folders(["nigth-1"])
    with pytest.raises(UserError, match=r"no sweep in .* matches 'x\*'"):
        sweep_folders(["x*"])


def test_a_folder_without_records_is_no_sweep(tmp_path):
    with pytest.raises(UserError, match="has no records"):
        read_folder(tmp_path)
    with pytest.raises(UserError, match="cannot be read"):
        read_folder(tmp_path / "nowhere")
    (tmp_path / "somewhere").mkdir()
    with pytest.raises(UserError, match=r"there is no sweep 'a': .*/ has none yet"):
        sweep_folders(["a"], tmp_path / "somewhere")
    with pytest.raises(
        UserError, match=r"there is no sweep 'a', and no folder .*/somwhere: did you mean 'somewhere'\? choose"
    ):
        sweep_folders(["a"], tmp_path / "somwhere")


def test_one_name_for_two_option_sets_is_told_apart_by_what_differs(tmp_path):
    records = [
        sweeps.job("flex", options={"block": 64, "fast": True, "same": 1}),
        sweeps.job("flex", options={"block": 128, "fast": None, "same": 1}),
        sweeps.job("cudnn"),
    ]
    results = named(sweeps.sweep(tmp_path / "s", records).results)
    assert {result.label for result in results} == {
        "flex(block=64,fast=true)",
        "flex(block=128,fast=null)",
        "cudnn",
    }


@pytest.mark.parametrize(
    ("compiled", "same"),
    [
        (None, True),
        (Compile(), True),
        (Compile(mode="max-autotune"), False),
        (Compile(mode="default", options={"a": 1}), False),
    ],
)
def test_how_a_backend_was_compiled_is_part_of_who_it_is(tmp_path, compiled, same):
    write_record(sweeps.job(compile=compiled or Compile()), tmp_path)
    tree = json.loads((tmp_path / FILE_NAME).read_bytes())
    if compiled is None:  # as records were before there was a choice
        del tree["request"]["compile"]
    result = decode(json.dumps(tree).encode(), tmp_path / FILE_NAME)
    assert result.label == sweeps.job(compile=compiled or Compile()).label
    write_record(sweeps.job(), tmp_path)
    plain = decode((tmp_path / FILE_NAME).read_bytes(), tmp_path / FILE_NAME)
    assert (result.key == plain.key) == same


def test_whose_kernels_a_backend_took_stands_behind_it_and_need_not_be_typed(tmp_path):
    record = sweeps.job("auto", 50.0)
    record = replace(record, passes={name: replace(one, took="cudnn") for name, one in record.passes.items()})
    folder = sweeps.write(tmp_path / "s", [record, sweeps.job("flash")])
    results = read_folder(folder).results
    assert [result.label for result in results] == ["auto (cudnn)", "flash"]
    assert record.label == "auto (cudnn)"
    found = compare(folder, baseline="auto")
    gains = {row.cell.result.label: row.gain.value for row in found.rows if row.cell.direction == "forward"}
    assert gains == {"auto (cudnn)": 1.0, "flash": pytest.approx(0.5)}


def test_a_result_whose_file_is_gone_says_so(tmp_path):
    result = lean(tmp_path, sweeps.job())
    (tmp_path / FILE_NAME).unlink()
    with pytest.raises(RecordError, match="was deleted meanwhile"):
        result.record()


def test_a_backend_s_new_option_or_a_case_s_new_field_keeps_the_join(tmp_path):
    """Keys are made of what was decoded, not of the job's name: a field that is added later has its default in both."""
    one, other = sweeps.job(), sweeps.job()
    other = replace(other, request=replace(other.request, job="flash-anothername"))
    results = sweeps.sweep(tmp_path / "s", [one, other]).results
    assert results[0].key == results[1].key
    assert Path(results[0].path).parent.name != Path(results[1].path).parent.name
