"""Plots: what they contain, by the figures themselves; nothing here looks at pixels."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import sweeps

from attn_exp import compare
from attn_exp.commands.compare import main
from attn_exp.core.record.record import Timing
from attn_exp.core.record.request import Compile
from attn_exp.results.result import decode

pytest.importorskip("matplotlib")

from attn_exp.plots.all import charts, write_charts
from attn_exp.plots.heatmap import heatmap_chart
from attn_exp.plots.lengths import lengths_chart
from attn_exp.plots.style import looks

LENGTHS = (512, 1024, 2048, 8192)


def a_job(backend, us, length, causal=True, **more):
    job = sweeps.job(backend, us, us * 2.5, of=sweeps.case(seq_len=length, causal=causal), **more)
    metrics, passes = dict(job.metrics), {}
    for side in ("forward", "backward"):
        metrics |= {f"{side}/min_bytes": 1e6 * length}
        metrics[f"{side}/gb_per_s"] = 1e3 * length / metrics[f"{side}/time_us"]
        times = tuple(us * (1 + 0.001 * (index % 7)) for index in range(40))
        timing = Timing(timer="device", l2="cold", times_us=times, rounds=(0,) * 40, stop_reason="precise")
        passes[side] = replace(job.passes[side], timings=(timing,))
    del metrics["backward/error_out"]
    metrics |= {f"backward/error_{name}": 3e-3 for name in ("dq", "dk", "dv")}
    ceilings = {"copy_bytes_per_s": 4.1e12, "matmul_flops_per_s": 7.2e14}
    return replace(job, metrics=metrics, passes=passes, ceilings=ceilings)


def records(factor=1.0):
    found = []
    for length in LENGTHS:
        for causal in (True, False):
            for backend, slower in (("flash", 1.0), ("cudnn", 0.7), ("mine", 3.0)):
                found.append(a_job(backend, factor * slower * 20.0 * (length / 512) ** 2, length, causal))
    reason = "CUDA out of memory"
    return [*found, sweeps.failed("out_of_memory", "math", reason, of=sweeps.case(seq_len=8192))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("plots")
    sweeps.write(place / "one", records())
    return place


@pytest.fixture(scope="module")
def drawn(folder):
    return {chart.name: chart for chart in charts(compare(folder / "one", baseline="flash"))}


def panels(chart):
    return [axes for axes in chart.figure.axes if axes.get_label() != "<colorbar>"]


def legend(chart):
    return [text.get_text() for one in chart.figure.legends for text in one.get_texts()]


def test_all_that_make_sense_are_drawn_with_captions_that_say_of_what(drawn):
    assert list(drawn) == ["heatmap", "lengths", "roofline", "accuracy", "samples", "bandwidth"]
    for chart in drawn.values():
        assert "NVIDIA H200" in chart.caption and "2026-03-01" in chart.caption and "n = " in chart.caption
        # What no case has is not what all have.
        assert "False" not in chart.caption and "None" not in chart.caption
        words = " ".join(text.get_text().replace("\n", " ") for text in chart.figure.texts)
        assert chart.caption in words
        assert chart.figure.get_suptitle() == chart.title


def test_curves_against_length_have_the_records_numbers_units_and_ticks(drawn):
    chart = drawn["lengths"]
    own = panels(chart)
    assert [axes.get_title() for axes in own] == ["forward", "backward", "", ""]
    assert {axes.get_ylabel() for axes in own[::2]} == {"causal\nTFLOPS", "full\nTFLOPS"}
    assert own[2].get_xlabel() == "sequence length, tokens"
    assert legend(chart) == ["cudnn", "flash", "mine"]
    chart.figure.draw_without_rendering()
    assert [tick.get_text() for tick in own[2].get_xticklabels()] == ["512", "1k", "2k", "8k"]
    by_label = {one.get_label(): one.lines[0] for one in own[0].containers}
    causal = own[0].get_ylabel().startswith("causal")
    flash = [one for one in records() if one.label == "flash" and one.request.case.causal == causal]
    assert list(by_label["flash"].get_xdata()) == list(LENGTHS)
    assert list(by_label["flash"].get_ydata()) == [one.metrics["forward/tflops"] for one in flash]


def test_many_lengths_have_ticks_apart():
    jobs = [
        a_job(name, us * length, length)
        for name, us in (("flash", 0.1), ("math", 0.9))
        for length in range(128, 3329, 128)
    ]
    chart = lengths_chart([decode(msgspec.json.encode(one), Path("record.json")) for one in jobs])
    ticks = list(panels(chart)[0].xaxis.get_major_locator().locs)
    assert 4 < len(ticks) <= 10 and set(ticks) <= set(range(128, 3329, 128))
    assert all(after / before >= 1.4 for before, after in zip(sorted(ticks), sorted(ticks)[1:], strict=False))


def test_bandwidth_is_drawn_over_whatever_shapes_a_sweep_varies(drawn, tmp_path):
    assert panels(drawn["bandwidth"])[2].get_xlabel() == "sequence length, tokens"
    of = [sweeps.case(seq_len=512, batch=batch, head_dim=dim) for batch, dim in ((1, 64), (1, 128), (16, 64))]
    rates = {"cudnn": (900.0, 1000.0, 1100.0), "flash": (300.0, 400.0, 500.0)}
    jobs = []
    for backend, several in rates.items():
        for case, rate in zip(of, several, strict=True):
            made = sweeps.job(backend, 20.0, None, of=case)
            jobs.append(replace(made, metrics=made.metrics | {"forward/gb_per_s": rate}))
    # One shape is no plot; and what varies beside the lengths of some is not left out.
    longer = replace(sweeps.job("flash", 20.0, None, of=sweeps.case(seq_len=4096, batch=1, head_dim=64)),
                     metrics=jobs[0].metrics)  # fmt: skip
    for name, several, shapes in (("one", jobs[::3], 0), ("shapes", jobs, 3), ("both", [*jobs, longer], 4)):
        every = charts(compare(sweeps.write(tmp_path / name, several)))
        chart = next((one for one in every if one.name == "bandwidth"), None)
        assert (chart is not None) == bool(shapes)
        if chart is not None:
            (own,) = panels(chart)
            assert len(own.get_yticks()) == shapes and own.get_ylabel() == "" and own.get_xlabel() == "GB/s"
            assert legend(chart) == ["cudnn", "flash"] and "length" not in chart.title
        if name == "shapes":
            assert [tick.get_text() for tick in own.get_yticklabels()] == ["b1 d64", "b1 d128", "b16 d64"]
            lines = {one.get_label(): one.lines[0] for one in own.containers}
            assert {label: tuple(line.get_xdata()) for label, line in lines.items()} == rates
            assert all([round(y) for y in line.get_ydata()] == [0, 1, 2] for line in lines.values())
            assert all(line.get_linestyle() == "None" for line in lines.values())
    drawn_of = {one.get_label(): one.lines[0].get_color() for one in panels(drawn["bandwidth"])[0].containers}
    assert {label: line.get_color() for label, line in lines.items()}.items() <= drawn_of.items()


def test_long_names_of_cases_leave_the_panel_its_room(tmp_path, recwarn):
    packed = {"lengths": (1,) * 31 + (0,), "kv_lengths": (4090,) * 31 + (0,)}
    requests = sweeps.case(batch=1, q_len=31, kv_len=31 * 4090, **packed)
    jobs = [sweeps.job("flash", 20.0, None, of=case) for case in (requests, sweeps.case(seq_len=4096, page_size=16))]
    jobs = [replace(one, metrics=one.metrics | {"forward/gb_per_s": 900.0}) for one in jobs]
    names = ""
    for chart in charts(compare(sweeps.write(tmp_path / "long", jobs))):
        chart.figure.draw_without_rendering()
        assert all(axes.get_position().width > 0.3 for axes in panels(chart)), chart.name
        names += "".join(tick.get_text() for axes in panels(chart) for tick in axes.get_yticklabels())
    assert "31q1s4090_q0" in names and "page16" in names and not recwarn.list


def test_the_heatmap_has_a_cell_a_backend_and_case_with_its_gain_or_why_not(drawn):
    axes = panels(drawn["heatmap"])[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["cudnn", "flash", "math", "mine"]
    names = [tick.get_text() for tick in axes.get_yticklabels()]
    assert len(names) == 8 and "s8192 causal" in names and "s512 full" in names
    cells = {(round(text.get_position()[0]), round(text.get_position()[1])): text for text in axes.texts}
    row = names.index("s8192 causal")
    assert [cells[column, row].get_text() for column in range(4)] == ["1.43", "1.00", "memory", "0.33"]
    assert cells[0, row].get_fontweight() == "bold"
    assert cells[2, names.index("s512 full")].get_text() == ""


def test_a_heatmap_that_is_cut_drops_the_slowest(folder, monkeypatch):
    monkeypatch.setattr("attn_exp.plots.heatmap._MOST_COLUMNS", 3)
    axes = panels(heatmap_chart(compare(folder / "one", baseline="flash")))[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["cudnn", "flash", "mine"]


def test_the_roofline_has_both_roofs_and_every_point(drawn):
    chart = drawn["roofline"]
    (axes,) = panels(chart)
    assert "measured: 720 TFLOPS, 4.1 TB/s" in legend(chart)
    assert "datasheet: 989.4 TFLOPS, 4.8 TB/s" in legend(chart)
    points = [line for line in axes.lines if line.get_linestyle() == "None"]
    assert sum(len(line.get_xdata()) for line in points) == 2 * 24
    assert axes.get_xlabel() == "arithmetic intensity, FLOP per compulsory byte"
    roofs = [line for line in axes.lines if line.get_linestyle() != "None"]
    assert {round(max(line.get_ydata()), 1) for line in roofs} == {720.0, 989.4}


def test_samples_and_errors_are_the_records(drawn):
    axes = panels(drawn["samples"])[0]
    dots = [line for line in axes.lines if line.get_marker() == "."]
    assert len(dots) == 16 and all(len(line.get_xdata()) == 40 for line in dots)
    assert "Of 24 jobs" in drawn["samples"].caption
    forward, backward = panels(drawn["accuracy"])
    assert forward.get_ylabel() == "relative error against float32" and forward.get_xlabel() == "TFLOPS"
    assert {value for line in forward.lines for value in line.get_ydata()} == {2e-3}
    assert {value for line in backward.lines for value in line.get_ydata()} == {3e-3}


def test_a_backend_looks_the_same_in_every_sweep_and_no_two_look_alike(tmp_path):
    names = ("auto", "flash", "efficient", "cudnn", "math", "eager", "reference", "flex", "triton", "cudnn_graph",
             "aten_cudnn", "priority", "compiled", "mine", "theirs", "another")  # fmt: skip
    every = sweeps.sweep(tmp_path / "a", [sweeps.job(name) for name in names]).results
    style = looks(every)
    assert len(set(style.values())) == len(names)
    for name in names[:13]:
        alone = sweeps.sweep(tmp_path / name, [sweeps.job(name)]).results
        assert looks(alone)[name] == style[name]
    how = Compile(mode="max-autotune")
    both = sweeps.sweep(tmp_path / "b", [sweeps.job("flex"), sweeps.job("flex", compile=how)]).results
    plain, compiled = looks(both)["flex"], looks(both)["flex+max-autotune"]
    assert plain.colour == compiled.colour and plain.line != compiled.line


def test_a_senseless_chart_is_not_drawn(tmp_path):
    alone = compare(sweeps.write(tmp_path / "alone", [a_job("flash", 20.0, 512)]))
    assert "lengths" not in (names := [chart.name for chart in charts(alone)]) and "heatmap" not in names
    bare = [replace(a_job("flash", 20.0, 512), metrics={"forward/time_us": 1.0, "backward/time_us": 1.0})]
    assert [chart.name for chart in charts(compare(sweeps.write(tmp_path / "bare", bare)))] == ["samples"]


def test_the_command_writes_the_same_files_as_another_process_which_imports_no_pyplot(
    folder, tmp_path, capsys, monkeypatch
):
    code = (
        "import sys; from pathlib import Path; from attn_exp import compare\n"
        "from attn_exp.plots.all import write_charts\n"
        f"print(len(write_charts(compare({str(folder / 'one')!r}), Path({str(tmp_path / 'p')!r}))))\n"
        "assert 'matplotlib.pyplot' not in sys.modules and 'torch' not in sys.modules"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "12\n"), ran.stderr
    monkeypatch.chdir(folder)
    assert main(["one", "folder=.", "rows=3", f"plots={tmp_path / 'q'}"]) == 0
    out, err = capsys.readouterr()
    assert "flash" in out and err == f"12 plots are in {tmp_path / 'q'}\n"
    assert {path.suffix for path in (tmp_path / "q").iterdir()} == {".svg", ".png"}
    for path in (tmp_path / "p").glob("*.svg"):
        assert path.read_text() == (tmp_path / "q" / path.name).read_text()


def test_a_folder_that_cannot_be_made_for_them_is_one_sentence(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    (tmp_path / "file").write_text("")
    assert main(["one", "folder=.", f"plots={tmp_path / 'file'}"]) == 2
    assert "cannot write plots" in capsys.readouterr().err


def test_a_time_limit_leaves_out_what_comes_last(folder, tmp_path):
    told = []
    found = compare(folder / "one")
    written = write_charts(found, tmp_path / "p", limit_s=0.0, left_out=lambda: told.append("left out"))
    assert [path.stem for path in written] == ["heatmap", "heatmap"] and told == ["left out"]
