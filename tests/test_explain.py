import re
import sqlite3
from dataclasses import replace

import pytest
import sweeps
from cli import without_progress

from attn_exp.commands.explain import main
from attn_exp.commands.log import main as log_main
from attn_exp.core.record.profile import Profile, ProfiledKernel
from attn_exp.core.record.record import Kernel, PassRecord
from attn_exp.explain.page import keep_pages
from attn_exp.results.read import read_folder

CEILINGS = {"matmul_flops_per_s": 720e12, "copy_bytes_per_s": 4e12}
STALLS = {"forward/stall_wait_share": 0.2, "forward/stall_gmma_share": 0.5, "forward/stall_selected_share": 0.9}
SHARED_KERNEL = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1"


def job(backend, us, **more):
    record = sweeps.job(backend, us, None, ceilings=CEILINGS, **more)
    return replace(record, metrics=record.metrics | {"forward/min_bytes": 1e8, "forward/gb_per_s": 1e5 / us})


def with_kernel(record, name):
    measured = replace(record.passes["forward"], kernels=(Kernel(name=name, count=1.0, time_us=90.0),))
    return replace(record, passes={"forward": measured})


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A sweep `first`: two backends of one kernel, the slower `flash` with profiles, and one that could not run."""
    kernel = ProfiledKernel(
        direction="forward", name="flash_fwd<1>(int)", count=2, time_us=110.0,
        figures={"grid": "132x1x1", "registers": 168.0, "tflops": 300.5, "gap_before_us": 30.0, "occupancy": 0.125},
    )  # fmt: skip
    profiles = {
        "torch": Profile(
            status="ok",
            seconds=1.5,
            kernels=(kernel,),
            files=("profiles/torch/trace.json",),
            metrics={"forward/kernel_time_us": 110.0, "forward/tflops": 312.5},
        ),
        "proton": Profile(status="unavailable", reason="triton is not installed: pip install triton"),
        "ncu": Profile(status="ok", metrics={"forward/dram_bytes": 2e8, **STALLS}),
    }
    sweeps.write(
        tmp_path / "multirun" / "first",
        [
            replace(job("flash", 120.0, flags=("launch_bound",)), profiles=profiles),
            with_kernel(job("cudnn", 80.0), SHARED_KERNEL),
            with_kernel(job("aten_cudnn", 80.2), SHARED_KERNEL),
            sweeps.failed("unsupported", "fa3", "it is not installed", bwd_us=None),
        ],
    )
    sweeps.write(tmp_path / "multirun" / "other", [job("flash", 70.0)])
    monkeypatch.chdir(tmp_path)
    return tmp_path / "multirun" / "first"


def page(capsys, *arguments):
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_a_page_says_what_ran_how_long_what_bounds_it_and_who_is_faster(here, capsys):
    text = page(capsys, "first/flash")
    assert "NVIDIA H200, torch 2.11.0" in text
    assert "forward: 120 us, +-0.3 %" in text
    assert "flash_forward" in text, "the kernel by the timing's own trace"
    assert "132x1x1" in text and "flash_fwd<1>" in text and "(int)" not in text
    assert "forward: 110.0 us in kernels, 312.5 TFLOPS" in text
    (row,) = (line.split() for line in text.splitlines() if "132x1x1" in line)
    assert row[-5:] == ["132x1x1", "168", "0.12", "30", "300.5"], "counts are whole, shares have two digits"
    assert "gap before: us for which the device was idle" in text
    assert "forward is bound by " in text and "counted bytes" in text
    assert "its warps mostly wait for gmma, 50 % of their time" in text
    # The other sweep's flash is faster, but another sweep's.
    assert "forward: 3 of 3; cudnn (80.00 us," in " ".join(text.split())
    assert "and this takes 1.5 times as long" in " ".join(text.split())
    assert f"cudnn's is {SHARED_KERNEL[:34]}" in text
    assert "proton unavailable: triton is not installed" in text
    assert "profiles/torch/trace.json" in text
    assert "launch_bound: " in text
    assert max(map(len, text.splitlines())) <= 120


def test_two_that_ran_the_same_kernel_are_told_so_and_not_ranked_within_their_intervals(here, capsys):
    text = " ".join(page(capsys, "first/cudnn").split())
    assert "forward: as fast as aten_cudnn (80.20 us" in text
    assert "same kernel: both run cudnn_generated" in text and "and their intervals agree" in text


def test_a_job_that_failed_has_a_page_too(here, capsys):
    text = page(capsys, "first/fa3")
    assert "unsupported: it is not installed" in text
    assert "What limits it" not in text and "worker.log" not in text, "there is no log"
    log = next(here.glob("fa3-*")) / "worker.log"
    for content in ("", "printed"):
        log.write_text(content)
        assert ("worker.log" in page(capsys, "first/fa3")) == bool(content)


def test_a_sweep_s_page_says_who_ran_the_same_kernel(here, capsys):
    text = page(capsys, "first")
    assert "sweep first: 4 jobs" in text
    assert f"forward: cudnn, aten_cudnn ran the same kernel: {SHARED_KERNEL[:34]}" in text
    assert "forward: flash ran flash_forward" in text
    assert [line.split()[0] for line in text.splitlines() if " ok " in line] == ["cudnn", "aten_cudnn", "flash"]


def test_a_sweep_s_page_has_its_cases_in_order_and_names_what_can_be_typed(here, capsys):
    cases = [sweeps.case(seq_len=length) for length in (8192, 512, 4096, 1024, 128, 2048, 256)]
    sweeps.write(here.parent / "lengths", [job("flash", 100.0, of=case) for case in cases])
    text = page(capsys, "lengths")
    assert re.findall(r" s(\d+) ", text) == ["128", "256", "512", "1024", "2048", "4096"]
    assert "1 of the 7 cases are left out here; all of them: attn-exp compare multirun/lengths" in text
    (command,) = re.findall(r"attn-exp explain (multirun/lengths/flash-\S+)", text)
    assert " s128 " in page(capsys, command)


def test_on_a_cpu_too_the_same_kernel_is_named_by_the_operator_that_computes_attention(here, capsys):
    names = ("aten::scaled_dot_product_attention", "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::empty")

    def ran(backend, us, *operators):
        kernels = tuple(Kernel(name=name, count=1.0, time_us=us) for name in operators)
        return replace(job(backend, us, device="cpu"), passes={"forward": PassRecord(kernels=kernels)})

    sweeps.write(here.parent / "cpu", [ran("flash", 100.0, *names), ran("auto", 101.0, *names[::-1]),
                                       ran("math", 900.0, names[0]), ran("mine", 950.0, names[0])])  # fmt: skip
    text = " ".join(page(capsys, "cpu").split())
    said = f"forward: flash, auto ran the same kernel: {names[1]}"
    assert said in text and "math" not in text[text.index(said) + len(said) :].partition("a page about")[0]
    assert f"same kernel: both run {names[1]}" in " ".join(page(capsys, "cpu/auto").split())
    # The wrapper is the longest operator of both, and no implementation.
    text = " ".join(page(capsys, "cpu/math").split())
    assert f"this one's main operator is {names[0]} flash's is {names[1]}" in text and "same operator" not in text


def test_a_sweep_s_page_names_the_records_that_it_lacks(here, capsys):
    broken = next(here.glob("flash-*")) / "record.json"
    broken.write_bytes(broken.read_bytes()[:100])
    text = page(capsys, "first")
    assert f"skipped: multirun/first/{broken.parent.name}/record.json is not a record" in text.replace("\n  ", " ")


def test_every_way_of_naming_a_job_finds_it(here, capsys):
    folder = next(here.glob("flash-*"))
    wanted = page(capsys, "first/flash")
    for word in (str(folder), f"{folder}/", str(folder / "record.json"), f"first/{folder.name}"):
        assert page(capsys, word).splitlines()[3:] == wanted.splitlines()[3:]
    assert "forward: 70 us" in page(capsys, "other")
    assert "forward: 70 us" in page(capsys, "multirun/other")
    # By its name alone, where it was measured last.
    cudnn = next(here.glob("cudnn-*"))
    assert "forward: 80 us" in page(capsys, cudnn.name)
    assert "forward: 120 us" in page(capsys, "first/flash", f"folder={here.parent}")


def test_an_mlflow_run_is_found_with_its_rivals(here, capsys):
    assert log_main(["first"]) == 0
    capsys.readouterr()
    with sqlite3.connect("mlruns/mlflow.db") as database:
        own = "SELECT tags.run_uuid FROM tags JOIN runs USING (run_uuid) WHERE name LIKE ? AND tags.value = ?"
        (run,) = database.execute(own, ("flash %", "job")).fetchone()
        (sweep,) = database.execute(own, ("%", "sweep")).fetchone()
    text = page(capsys, run)
    assert "forward: 120 us" in text and "3 of 3" in text
    assert main([f"{99:032x}"]) == 2
    assert "there is no run" in capsys.readouterr().err
    assert main([sweep]) == 2
    assert "is not a job's but of kind sweep: give a job's run, or the sweep's name first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fist"], "there is no sweep 'fist': did you mean 'first'?"),
        (["first/flsh"], "there is no job 'flsh'"),
        (["first/f"], "2 jobs begin with 'f'"),
        (["first", "other"], "explain takes one JOB_OR_SWEEP, and 2 were given: attn-exp explain SWEEP/JOB"),
        (["folder=x"], "no JOB_OR_SWEEP was given: write one, for example attn-exp explain "),
        (["first", "folde=x"], "there is no option 'folde=': did you mean 'folder'?"),
        (["first", "folder=nowhere"], "there is no sweep 'first'"),
        (["0" * 32], "there is no database"),
        (["0" * 32, "uri=http://nowhere"], "Failed to resolve 'nowhere'; or give the job's folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistyped_word_is_one_sentence(here, capsys, arguments, words):
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(without_progress(said.strip())) == 1


def test_the_pages_of_profiled_jobs_are_kept_beside_their_profiles(here):
    for name in ("flash", "fa3"):
        (next(here.glob(f"{name}-*")) / "profiles").mkdir()
    (name, (kept,)), *others = keep_pages(read_folder(here).results).items()
    assert not others and name == next(here.glob("flash-*")).name
    assert kept.name == "explain.txt" and "forward: 3 of 3" in kept.read_text()
