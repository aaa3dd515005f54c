"""The processes that draw a sweep's plots while the command does something else."""

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest
import sweeps

from attn_exp import compare
from attn_exp.plots.all import charts
from attn_exp.plots.process import done
from attn_exp.plots.style import available
from attn_exp.plots.task import Done, Task
from attn_exp.results.read import read_folder
from attn_exp.run import closing, drawing
from attn_exp.run.drawing import Drawing, drawing_for

pytestmark = pytest.mark.skipif(not available(), reason="matplotlib is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shorter = replace(sweeps.CASE, q_len=sweeps.CASE.q_len // 2, kv_len=sweeps.CASE.kv_len // 2)
    jobs = [sweeps.job(backend, of=case) for backend in ("math", "flash") for case in (shorter, sweeps.CASE)]
    return sweeps.write(tmp_path_factory.mktemp("drawn") / "s", jobs)


def drawn(folder: Path, processes: Drawing) -> tuple[list[Path], list[str]]:
    said: list[str] = []
    closing.begin_plots(folder, processes)
    sweep = read_folder(folder)
    plots, _ = closing.plots_and_curves(sweep, closing.ranked_rivals(sweep, said.append), said.append, processes)
    return plots, said


@pytest.fixture(scope="module")
def names(folder: Path) -> set[str]:
    return {chart.name for chart in charts(compare(folder))}


def test_each_chart_is_in_one_part(folder: Path, names: set[str]) -> None:
    shares = [[chart.name for chart in charts(compare(folder), part, 4)] for part in range(4)]
    assert sorted(itertools.chain.from_iterable(shares)) == sorted(names) and len(names) >= 3
    assert all(len(share) < len(names) for share in shares)


def test_processes_share_the_charts_of_a_sweep_and_end(
    folder: Path, names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine draws slowly.
    monkeypatch.setattr(closing, "LIMIT_S", 60.0)
    monkeypatch.setattr(drawing, "_PATIENCE_S", 90.0)
    processes = Drawing(2)
    processes.start()
    pids = [process.pid for process in processes._processes]
    plots, said = drawn(folder, processes)
    processes.close()
    assert said == []
    assert {path.name for path in plots} == {f"{name}.{kind}" for name in names for kind in ("svg", "png")}
    assert all(path.parent == folder / "plots" and path.stat().st_size > 1000 for path in plots)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_what_was_not_drawn_for_want_of_time_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing, "LIMIT_S", 0.0)
    sweep, said, noted = read_folder(folder), list[str](), list[str]()
    rivals = closing.ranked_rivals(sweep, said.append)
    plots, _ = closing.plots_and_curves(sweep, rivals, said.append, note=noted.append)
    command = f"attn-exp compare {folder} plots=plots"
    assert len(plots) == 2 and (said, noted) == ([], [f"not all plots were drawn within 0 s; all of them: {command}"])
    processes = Drawing(1)
    processes.start()
    closing.begin_plots(folder, processes)
    closing.plots_and_curves(sweep, rivals, said.append, processes, noted.append)
    processes.close()
    assert said == [] and noted == [noted[0]] * 2


def test_a_process_that_ends_costs_the_plots_and_nothing_else(folder: Path) -> None:
    processes = Drawing(1)
    processes.start()
    processes._processes[0].kill()
    plots, said = drawn(folder, processes)
    processes.close()
    assert plots == [] and said == ["no plots: a process that draws them ended, or took too long"]


def test_no_process_draws_through_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "s").symlink_to(folder)
    (tmp_path / "plots").symlink_to(folder)
    asked = Drawing(1)
    asked.begin = lambda *_: pytest.fail("asked")  # type: ignore[method-assign,assignment]
    closing.begin_plots(tmp_path, asked)
    sweep, said = replace(read_folder(folder), place=str(tmp_path)), list[str]()
    plots, _ = closing.plots_and_curves(sweep, closing.ranked_rivals(sweep, said.append), said.append, asked)
    assert plots == [] and len(said) == 1 and "nothing is written through one" in said[0]


def test_what_a_process_cannot_draw_is_said(tmp_path: Path) -> None:
    processes = Drawing(1)
    processes.start()
    processes.begin(tmp_path / "nowhere", tmp_path, 1.0)
    with pytest.raises(Exception, match="nowhere"):
        processes.files(tmp_path)
    processes.close()


def test_nothing_is_started_beside_a_measurement_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "allowed_cpus", lambda: range(16))
    beside = drawing_for("cuda")
    assert drawing_for("cpu") is None
    assert beside is not None and beside._parts == 4
    monkeypatch.setattr(drawing, "allowed_cpus", lambda: range(2))
    assert drawing_for("cuda") is None


def test_a_single_job_needs_no_plot(tmp_path: Path) -> None:
    alone = sweeps.write(tmp_path / "s", [sweeps.job("math")])
    assert done(Task(sweep=str(alone), into=str(tmp_path / "plots"), limit_s=9.0), 0, 1) == Done()
    assert not (tmp_path / "plots").exists()
