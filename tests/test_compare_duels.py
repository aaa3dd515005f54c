"""The duels that would decide: every command that is printed composes to the very case and backends it is about."""

import shlex
from dataclasses import replace

import pytest
import sweeps
from hypothesis import HealthCheck, given, settings
from strategies import cases, packed_cases

from attn_exp.commands.compare import main as compare_main
from attn_exp.commands.duel import COMMAND, main, rivals_of
from attn_exp.config.compose import compose_config, resolved_config
from attn_exp.config.request import request_from_config
from attn_exp.core.errors import UserError
from attn_exp.core.host.nvml import GpuInfo
from attn_exp.core.record.request import Compile
from attn_exp.results.cell import ChosenMetric, cells_of
from attn_exp.results.duel_command import case_words, duels

GPU = GpuInfo(index=0, uuid="GPU-0", name="NVIDIA H200")


def asked(command, gpus=(GPU,)):
    words = shlex.split(command)
    assert words[:2] == ["attn-exp", "duel"]
    rivals, shared = rivals_of(words[2:])
    return [
        request_from_config(resolved_config(compose_config([*own, *shared], "a")), list(gpus))
        for own in rivals.values()
    ]


def command(folder, one, other, direction="forward"):
    cells = cells_of(sweeps.sweep(folder / "s", [one, other]).results, ChosenMetric())
    pair = [cell for cell in cells if cell.direction == direction]  # by the name of the job
    return duels([(pair[0], pair[1])])[0].command


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases() | packed_cases())
def test_any_case_composes_to_itself(case):
    request = request_from_config(resolved_config(compose_config(case_words(case, "of my own"), "a")), [GPU])
    assert request.case == case


@pytest.mark.parametrize("model", ["mistral_7b", "gemma2", "llama4_scout"])
def test_a_case_without_its_model_s_mask_or_softcap_composes_to_itself(model):
    own = request_from_config(resolved_config(compose_config([f"model={model}"], "a")), [GPU]).case
    for case in (
        own,
        replace(own, window=None, chunk=None, softcap=None),
        replace(own, causal=False, window=None, chunk=None),
    ):
        words = case_words(case, model)
        assert f"model={model}" in words
        assert request_from_config(resolved_config(compose_config(words, "a")), [GPU]).case == case


@pytest.mark.parametrize(
    "of",
    [
        sweeps.CASE,
        sweeps.case(dtype="float16", causal=False),
        sweeps.case(q_heads=32, kv_heads=8),
        sweeps.case(q_len=1, align="top_left"),
        sweeps.case(window=256),
        sweeps.case(head_dim=192, seq_len=4096),
    ],
)
def test_the_printed_command_measures_the_same(tmp_path, of):
    requests = asked(command(tmp_path, sweeps.job("cudnn", of=of), sweeps.job("flash", 90.0, of=of)))
    assert [request.case for request in requests] == [of, of]
    assert [request.backend["name"] for request in requests] == ["cudnn", "flash"]
    assert {(request.device, request.measuring.timer, request.measuring.passes) for request in requests} == {
        ("cuda", "device", ("forward",))
    }


def test_a_backward_is_measured_with_its_forward_and_other_ways_of_measuring_are_kept(tmp_path):
    jobs = [
        sweeps.job(name, us, measuring={"timer": "graph", "regime": "burst"})
        for name, us in (("flash", 9), ("cudnn", 8))
    ]
    for request in asked(command(tmp_path / "a", *jobs, direction="backward")):
        assert request.measuring.passes == ("forward", "backward")
        assert (request.measuring.timer, request.measuring.regime) == ("graph", "burst")
    jobs = [sweeps.job(name, us, device="cpu", measuring={"timer": "cpu"}) for name, us in (("flash", 9), ("math", 8))]
    assert {request.device for request in asked(command(tmp_path / "b", *jobs))} == {"cpu"}


def test_options_and_backends_from_elsewhere_come_along(tmp_path):
    own = {"_target_": "my_module.MyAttention", "scale": None, "tiles": [64, 128], "deep": {"on": True}}
    trusted = "# if you trust the class my_module.MyAttention of the record: "
    line = command(tmp_path, sweeps.job("mine", options=own), sweeps.job("cudnn_graph", 9, options={"api": "wrapper"}))
    # A line that is pasted as it is imports nothing that a record names.
    assert line.startswith(trusted)
    requests = asked(line.removeprefix(trusted))
    by_name = {request.backend["name"]: request.backend for request in requests}
    assert by_name["mine"] == {"name": "mine", **own}
    assert by_name["cudnn_graph"]["api"] == "wrapper"


def test_functions_of_ones_own_have_no_duel_but_an_assertion(tmp_path):
    jobs = [sweeps.job(name, us, model="given", measuring={"inputs": "given"}) for name, us in (("one", 9), ("two", 8))]
    said = "# one and two are your own functions: attn_exp.assert_not_slower measures both"
    assert command(tmp_path, *jobs) == said


def test_a_backend_that_is_compiled_in_its_own_way_is_so_in_the_duel(tmp_path):
    how = Compile(mode="max-autotune", fullgraph=True, options={"epilogue_fusion": False, "triton": {"cudagraphs": 1}})
    other = Compile(mode="default")
    words = command(tmp_path / "a", sweeps.job("flex", compile=how), sweeps.job("flash"))
    assert "b.compile=max-autotune" in words and " compile=" not in words
    assert [request.compile for request in asked(words)] == [Compile(), how]
    both = asked(command(tmp_path / "b", sweeps.job("flex", compile=how), sweeps.job("eager", compile=other)))
    assert [request.compile for request in both] == [other, how]
    named = replace(how, name="mine")
    both = asked(command(tmp_path / "c", sweeps.job("eager", compile=named), sweeps.job("eager", compile=other)))
    assert {one.label.split()[0]: one.compile for one in both} == {"eager+mine": named, "eager+default": other}


def test_the_command_really_runs_dry(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jobs = [sweeps.job(name, us, device="cpu", measuring={"timer": "cpu"}) for name, us in (("flash", 9), ("math", 8))]
    words = shlex.split(command(tmp_path, *jobs))[2:]
    assert main([*words, "dry_run=true"]) == 0
    said = capsys.readouterr().out
    assert said.count(sweeps.CASE.label()) == 2


def test_with_m_there_is_a_duel_for_each_combination_and_each_is_told_with_its_place(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["a=math,eager", "b=flash", "batch=1,1,2", "seq_len=64", "device=cpu", "dry_run=true"]
    assert main(["-m", *words]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[2:4] for line in out.splitlines()[::2]] == [
        ["a=math:", "b1"],
        ["a=math:", "b2"],
        ["a=eager:", "b1"],
        ["a=eager:", "b2"],
    ]
    lines = err.splitlines()
    assert [line.partition(",")[0].partition("]")[0] for line in lines] == ["[1/4", "[2/4", "[3/4", "[4/4"]
    assert lines[0].endswith("attn-exp duel a=math b=flash batch=1 seq_len=64 device=cpu dry_run=True")
    assert all("s left]" in line for line in lines[1:])
    # Without -m the words are those of one duel, and mistakes in any of them end all.
    assert main(words) == 2
    assert main(["-m", "a=math", "batch=1,2"]) == 2
    assert "needs two backends" in capsys.readouterr().err


def test_settle_runs_the_duels_that_the_comparison_proposes(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jobs = [
        sweeps.job(name, us, 2.5 * us, of=sweeps.case(seq_len=length))
        for length in (512, 1024)
        for name, us in (("flash", 100.0), ("cudnn", 100.1), ("eager", 300.0))
    ]
    sweeps.write(
        tmp_path / "s", [replace(one, request=replace(one.request, job=str(at))) for at, one in enumerate(jobs)]
    )
    ran, codes = [], iter((0, 1))
    monkeypatch.setattr(
        "attn_exp.commands.duel.COMMAND", replace(COMMAND, run=lambda given: ran.append(given.overrides) or next(codes))
    )
    # 1 is a regression.
    assert compare_main(["s", "folder=.", "settle=true"]) == 4
    # What a GPU left open no CPU settles.
    # Beside the sweep comparisons find them.
    where = f"folder='{tmp_path}/${{sweep}}'"
    assert [[*words[:2], *words[-3:]] for words in ran] == [
        ["a=cudnn", "b=flash", "seq_len=512", "device=cuda", where],
        ["a=cudnn", "b=flash", "seq_len=1024", "device=cuda", where],
    ]
    err = capsys.readouterr().err
    assert err.endswith("the answer with what the duels decided: attn-exp compare s folder=.\n")
    assert "[1/2] attn-exp duel a=cudnn b=flash" in err and "1 of 2 duels could not be measured" in err
    # Before anything is measured.
    said = "settle=true measures now: 2 duels for 4 ties; Ctrl-C ends it"
    assert err.index(said) < err.index("[1/2]")
    for word in ("settle", "--settle"):
        assert compare_main(["s", "folder=.", word]) == 2 and len(ran) == 2
        assert f"'{word}' has no value: write settle=true" in capsys.readouterr().err


def test_settle_without_ties_or_against_another_sweep_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweeps.write(tmp_path / "s", [sweeps.job("flash", 100.0, 250.0), sweeps.job("cudnn", 200.0, 500.0)])
    assert compare_main(["s", "folder=.", "settle=true"]) == 0
    assert "there is no duel to run" in capsys.readouterr().err
    assert compare_main(["s", "folder=.", "against=t", "settle=true"]) == 2
    assert "compare that sweep by itself" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["${oc.env:TOKEN}", "a\nb", "$(reboot)", "a'b", "x\\", "# x"])
def test_words_of_a_record_that_mean_something_to_a_shell_or_hydra_make_no_command(tmp_path, value):
    rivals = (
        {"options": {"note": value}},
        {"options": {value: 1}},
        {"compile": Compile(mode="x", options={"a": value})},
    )
    for index, of in enumerate((*rivals, {"model": value}, {"measuring": {"timer": value}})):
        try:
            line = command(tmp_path / str(index), sweeps.job("flash", **of), sweeps.job("cudnn", **of))
        except (IndexError, UserError):
            # A name of two lines: no request, and if it is in a file, no record.
            assert value == "a\nb"
            continue
        if "model" not in of:
            assert line.startswith("# ") and "\n" not in line and "is no plain word" in line
        assert value not in line.partition("since")[0]


@pytest.mark.parametrize("name", ["../../../etc/x", "", "/dev/zero"])
def test_the_name_of_a_record_s_model_is_no_path(tmp_path, name):
    line = command(tmp_path, *(sweeps.job(one, model=name) for one in ("flash", "cudnn")))
    assert "model=" not in line and "model.q_heads=16" in line
    asked(line)
