"""Reading sweeps for comparing: the same numbers as the whole record, and a sentence for what is none."""

import os
from dataclasses import replace

import pytest
import sweeps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import cases

from attn_exp import compare
from attn_exp.core.errors import UserError
from attn_exp.core.record.file import FILE_NAME, read_record, write_record
from attn_exp.results.read import read_folder, sweep_folders
from attn_exp.results.result import decode, named

# Of one line, as core/record/file.py demands.
NAMES = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), max_size=8)


def lean(folder, record):
    write_record(record, folder)
    path = folder / FILE_NAME
    return decode(path.read_bytes(), path)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases(), st.dictionaries(NAMES, st.just(0.0) | st.floats(1e-99, 1e12), max_size=5), st.floats(1, 2e9))
def test_a_result_says_what_the_whole_record_says(tmp_path, case, metrics, finished):
    timed = {f"{name}/time_us": 100.0 for name in ("forward", "backward")}
    record = sweeps.job(of=case, metrics=metrics | timed, finished_at=finished, flags=("drift",))
    result = lean(tmp_path, record)
    whole = result.record()
    assert whole == read_record(tmp_path)
    assert (result.case, result.measuring) == (case, whole.request.measuring)
    # An option that is younger than such records.
    assert result.backend == {"deterministic": False} | whole.request.backend
    assert (result.metrics, result.flags, result.environment) == (whole.metrics, whole.flags, whole.environment)
    assert (result.status, result.reason, result.finished_at) == (whole.status, whole.reason, whole.finished_at)
    assert (result.device_name, result.l2) == (whole.device_name, "cold")
    assert result.kernels == {"forward": ("flash_forward",), "backward": ("flash_backward",)}
    assert (result.longest_kernel("forward"), result.final, result.profiles) == ("flash_forward", True, ())
    assert result.label == whole.label == "flash"


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
    (tmp_path / "other.tar.xz").touch()
    with pytest.raises(UserError, match=r"is an archive: mkdir -p \S+ && tar -xf other.tar.xz -C \S+"):
        sweep_folders(["other.tar.xz"])


def test_a_folder_without_records_is_no_sweep(tmp_path):
    with pytest.raises(UserError, match="has no records"):
        read_folder(tmp_path)
    with pytest.raises(UserError, match="cannot be read"):
        read_folder(tmp_path / "nowhere")
    (tmp_path / "somewhere").mkdir()
    with pytest.raises(UserError, match=r"there is no sweep 'a': .*/ has none yet"):
        sweep_folders(["a"], tmp_path / "somewhere")


def test_one_name_for_two_option_sets_is_told_apart_by_what_differs(tmp_path):
    records = [
        sweeps.job("flex", options={"block": 64, "fast": True, "same": 1}),
        sweeps.job("flex", options={"block": 128, "fast": None, "same": 1}),
        sweeps.job("cudnn"),
    ]
    results = named(sweeps.sweep(tmp_path / "s", records).results)
    assert {result.label for result in results} == {"flex(block=64,fast=true)", "flex(block=128,fast=null)", "cudnn"}


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
