"""Nsight Compute's profile, with a program that prints recorded output; and the command that it runs."""

import csv
import itertools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from cli import environment
from fakes import make_record, make_request

from attn_exp.backends.eager import Eager
from attn_exp.backends.package import Unavailable
from attn_exp.core.files import write_whole
from attn_exp.core.record.request import REQUEST_NAME, Request
from attn_exp.profilers.base import Subject, kernels_csv
from attn_exp.profilers.ncu import Ncu
from attn_exp.profilers.ncu_program import NcuError, find_program
from attn_exp.profilers.ncu_table import COUNTERS, kernels, own_counter, pass_figures, read_launches
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.profile_pass import profile_job

FIXTURE = Path(__file__).parent / "fixtures" / "ncu_raw.csv"
FORWARD, REDUCE, DKDV = "flash_fwd_kernel(Params)", "reduce_kernel<512>(float *)", "flash_bwd_kernel(Params)"


@pytest.fixture
def program(tmp_path, monkeypatch):
    """The stand-in, on PATH as `ncu`, that prints the fixture."""
    folder = tmp_path / "bin"
    folder.mkdir()
    place = folder / "ncu"
    shutil.copy(Path(__file__).parent / "fake_ncu.py", place)
    place.chmod(0o755)
    shutil.copy(FIXTURE, tmp_path / "table.csv")
    monkeypatch.setenv("FAKE_NCU_CSV", str(tmp_path / "table.csv"))
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return place


@pytest.fixture
def subject(tmp_path):
    """A job that ran on a GPU, as far as its record says."""
    folder = tmp_path / "job" / "profiles" / "ncu"
    folder.mkdir(parents=True)
    request = replace(make_request(), device="cuda", profilers=({"name": "ncu", "_target_": "x"},))
    calls = {"forward": None, "backward": None}
    return Subject(make_record(request=request), Eager("e"), calls, None, None, tmp_path / "job", folder)


def told(tmp_path):
    return json.loads((tmp_path / "seen.json").read_text())


def test_counters_become_kernels_metrics_and_files(program, subject, tmp_path):
    found = Ncu("ncu").profile(subject)
    assert (found.status, found.reason) == ("ok", None)
    assert [(one.direction, one.name, one.count) for one in found.kernels] == [
        ("forward", FORWARD, 1.0),
        ("backward", DKDV, 1.0),
        ("backward", REDUCE, 2.0),
    ]
    first, _, reduce = found.kernels
    assert first.time_us == pytest.approx(200.0)
    assert first.figures["dram_bytes"] == pytest.approx(1.5e8)
    assert first.figures["dram_gb_per_s"] == pytest.approx(750.0)
    assert first.figures["sm_throughput"] == pytest.approx(0.62)
    assert (first.figures["grid"], first.figures["block"]) == ("132x1x1", "384x1x1")
    assert reduce.time_us == pytest.approx(10.0)
    assert reduce.figures["sm_throughput"] == pytest.approx((0.1 * 4 + 0.2 * 6) / 10), "the longer launch weighs more"
    at = found.metrics
    assert at["backward/time_us"] == pytest.approx(510.0)
    assert at["backward/dram_bytes"] == pytest.approx(4e8 + 2 * 1e6)
    assert at["forward/stall_gmma_share"] == pytest.approx(3.0 / 4.0)
    assert at["forward/kernels"] == 1.0
    assert not [name for name in at if "registers" in name]
    assert set(found.files) == {f"profiles/ncu/{name}" for name in ("kernels.csv", "launches.csv", "worker.log")}
    rows = list(csv.DictReader((subject.folder / "kernels.csv").read_text().splitlines()))
    assert [row["name"] for row in rows] == [FORWARD, DKDV, REDUCE]
    assert float(rows[1]["share"]) == pytest.approx(500 / 510, rel=1e-4)
    assert not (subject.folder / "report.ncu-rep").exists(), "the report is kept on demand alone"


def test_the_command_is_the_workers_own_in_a_folder_of_its_own(program, subject, tmp_path):
    Ncu("ncu", report=True, section_set="full", metrics=["dram__bytes_read.max"]).profile(subject)
    arguments = told(tmp_path)["arguments"]
    once = [sys.executable, "-m", "attn_exp.worker", "--once", str(subject.folder), "--until", str(os.getpid())]
    assert arguments[-7:] == once
    pairs = dict(itertools.pairwise(arguments))
    assert pairs["--clock-control"] == "none"
    assert pairs["--profile-from-start"] == "off"
    assert pairs["--set"] == "full"
    asked = pairs["--metrics"].split(",")
    assert {"gpu__time_duration.sum", "dram__bytes_read.max", "launch__registers_per_thread"} <= set(asked)
    assert "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio" in asked
    assert not [name for name in asked if name.startswith("lts__")], "this chip's list has none"
    request = msgspec.yaml.decode(told(tmp_path)["request"].encode(), type=Request)
    assert request == replace(subject.request, profilers=())
    assert not (subject.folder / REQUEST_NAME).exists()
    assert (subject.folder / "report.ncu-rep").exists()
    assert (subject.folder / "worker.log").read_text().startswith(str(program))


@pytest.mark.parametrize(
    ("says", "status", "words"),
    [
        ("permission", "unavailable", ["ERR_NVGPUCTRPERM", "NVreg_RestrictProfilingToAdminUsers=0", "CAP_SYS_ADMIN"]),
        ("busy", "unavailable", ["another tool", "dcgmi profile --pause"]),
        ("virtual", "unavailable", ["cannot read this GPU's counters", "is a vGPU", "another GPU"]),
        ("target", "failed", ["The application returned an error code (1): RuntimeError: out"]),
        ("no kernels", "failed", ["ncu ended with code 0"]),
    ],
)
def test_an_error_of_ncu_is_one_sentence(says, status, words, program, subject, monkeypatch):
    monkeypatch.setenv("FAKE_NCU", says)
    with pytest.raises((Unavailable, NcuError)) as error:
        Ncu("ncu").profile(subject)
    reason = str(error.value)
    assert isinstance(error.value, Unavailable) == (status == "unavailable"), reason
    assert all(word in reason for word in words), reason
    assert "\n" not in reason and len(reason) < 250
    assert not (subject.folder / REQUEST_NAME).exists()


def test_the_program_is_found_as_given_on_path_or_in_its_usual_places(program, tmp_path, monkeypatch):
    assert find_program(None) == program
    assert find_program(str(program)) == program
    with pytest.raises(Unavailable, match=r"profiler\.ncu\.program=/no/ncu is no program"):
        find_program("/no/ncu")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Unavailable, match=r"not installed: install nsight-compute, or set profiler\.ncu\.program="):
        find_program(None, places=())
    for version in ("2024.1.2", "2025.10.0", "2025.3.1"):
        (tmp_path / version).mkdir()
        shutil.copy(program, tmp_path / version / "ncu")
    assert find_program(None, places=(f"{tmp_path}/20*/ncu",)) == tmp_path / "2025.10.0" / "ncu"


def test_a_job_of_the_cpu_has_no_counters_and_keeps_its_timing(tmp_path):
    request = replace(make_request(), profilers=({"name": "ncu", "_target_": "attn_exp.profilers.ncu.Ncu"},))

    class Ready:
        backend, scope, calls_of = Eager("e"), None, staticmethod(lambda passes: {})

    record = profile_job(make_record(request=request), Ready, Machine("cpu"), tmp_path, lambda *_: None)
    assert record.status == "ok"
    assert record.profiles["ncu"].status == "unavailable"
    assert "set device=cuda" in record.profiles["ncu"].reason


TABLE = """==PROF== Connected, to process
"ID","Kernel Name","Grid Size","gpu__time_duration.sum","dram__bytes_read.sum","x__rate.sum"
"","","","us","Mbyte","Gbyte/second"
"0","a(int, float)","(1, 1, 1)","1,234.5","2","3"
"1","a(int, float)","(2, 1, 1)","n/a","(!) nan","nan"
"""


def test_units_numbers_and_what_was_not_measured_are_read():
    first, second = read_launches(TABLE)
    assert first.name == "a(int, float)" and first.block == ""
    assert first.values == {"gpu__time_duration.sum": 1234.5e3, "dram__bytes_read.sum": 2e6, "x__rate.sum": 3e9}
    assert second.values == {}
    (kernel,) = kernels([first, second], "forward", COUNTERS)
    assert (kernel.count, kernel.time_us) == (2.0, None), "the time of one launch is not that of two"
    assert "grid" not in kernel.figures, "two launches of different shape have none"
    assert "dram_bytes" not in kernel.figures, "half of it is not all"
    assert pass_figures([first], "backward", COUNTERS)["backward/dram_bytes_read"] == 2e6
    assert ",a(int" not in kernels_csv([kernel]) and '"a(int, float)"' in kernels_csv([kernel])


def test_output_of_ncu_2025_3_on_a_gpu_is_read():
    """Recorded with Nsight Compute 2025.3.1 on an H200, attributes of the device left out."""
    (launch,) = read_launches((FIXTURE.parent / "recorded_ncu_raw.csv").read_text())
    assert launch.name.startswith("cudnn_generated_fort_native_sdpa_sm90_flash_fprop")
    assert (launch.grid, launch.block) == ("(132, 1, 1)", "(384, 1, 1)")
    (kernel,) = kernels([launch], "forward", COUNTERS)
    assert kernel.time_us == 218.144
    assert kernel.figures["sm_throughput"] == pytest.approx(0.6924)
    assert kernel.figures["tensor_active"] == pytest.approx(0.6924)
    assert kernel.figures["sm_clock_mhz"] == pytest.approx(1683.03047528)
    assert kernel.figures["shared_memory_bytes"] == 233_472
    assert launch.values["dram__bytes.sum.per_second"] == 575_358_075_399.74
    (launch,) = read_launches((FIXTURE.parent / "recorded_ncu_metrics.csv").read_text())
    figures = pass_figures([launch], "forward", COUNTERS)
    assert figures["forward/dram_bytes"] == 11_264 + 8_293_376
    assert figures["forward/dram_gb_per_s"] == pytest.approx(8304640 / 42752)


def test_a_metric_that_the_program_does_not_list_is_told_before_anything_runs(program, subject, tmp_path):
    with pytest.raises(Unavailable, match=r"no metric dram__bytes_raed on this GPU: did you mean 'dram__bytes_read'\?"):
        Ncu("ncu", metrics=["dram__bytes_raed.sum"]).profile(subject)
    assert not (tmp_path / "seen.json").exists()
    assert own_counter("a__b.sum", frozenset({"a__b"})).kind == "sum"


def test_once_calls_each_pass_and_writes_no_record(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    request = make_request({"_target_": "lookers.Counts", "name": "counts", "path": str(tmp_path / "counted")})
    write_whole(folder / REQUEST_NAME, msgspec.yaml.encode(request))
    command = [sys.executable, "-m", "attn_exp.worker", "--once", str(folder)]
    ran = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    # The first call, two to warm up, and the one that is looked at.
    assert (tmp_path / "counted").read_text() == "4"
    assert [path.name for path in folder.iterdir()] == [REQUEST_NAME]


def test_once_ends_with_the_process_that_it_works_for(tmp_path):
    """Nsight Compute stands between them, and does not die when the worker is killed."""
    folder = tmp_path / "job"
    folder.mkdir()
    request = make_request({"_target_": "crashers.Hangs", "name": "hangs"})
    write_whole(folder / REQUEST_NAME, msgspec.yaml.encode(request))
    with subprocess.Popen(["sleep", "120"]) as worked_for:
        command = [sys.executable, "-m", "attn_exp.worker", "--once", str(folder), "--until", str(worked_for.pid)]
        with subprocess.Popen(command, env=environment(), cwd=tmp_path) as once:
            worked_for.kill()
            worked_for.wait()
            assert once.wait(240) == 1
    assert subprocess.run([*command[:-1], str(worked_for.pid)], env=environment(), cwd=tmp_path).returncode == 1
