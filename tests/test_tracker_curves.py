"""What a sweep's end adds: plots in its folder, curves in MLflow, neither ever at the sweep's expense."""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sweeps
from test_tracker_mlflow import config, logged, migrated, place, ready, runs_of  # noqa: F401

from attn_exp import load
from attn_exp.core.record.record import Record
from attn_exp.execution import closing
from attn_exp.execution.summary import curves
from attn_exp.results.read import Sweep, read_folder
from attn_exp.tracking.base import Curve

needs_mlflow = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="needs mlflow")


def records(*lengths: int, backends: tuple[str, ...] = ("flash", "cudnn")) -> list[Record]:
    return [
        sweeps.job(backend, 10.0 * length, of=sweeps.case(seq_len=length, causal=causal))
        for length in lengths
        for causal in (True, False)
        for backend in backends
    ]


def of_kind(runs: list[Any], kind: str) -> list[Any]:
    return [run for run in runs if run.data.tags["attn_exp.kind"] == kind]


def store(folder: Path, found: list[Record]) -> list[Any]:
    """Store a sweep with its curves; the runs below its own."""
    sweeps.write(folder / "first", found)
    own = curves(read_folder(folder / "first").results)
    named = [replace(one, request=replace(one.request, sweep="first")) for one in found]
    assert logged(folder, *named, curves=own) is None
    return runs_of(folder)[1] if found else []


def test_a_curve_is_one_backend_and_group_of_sizes_over_its_lengths(tmp_path: Path) -> None:
    found = curves(sweeps.sweep(tmp_path / "a", records(512, 1024, 4096)).results)
    assert {curve.name for curve in found} == {
        f"{backend} · {mask}" for backend in ("flash", "cudnn") for mask in ("causal", "full")
    }
    one = next(curve for curve in found if curve.name == "flash · causal")
    assert [length for length, _ in one.points["forward/tflops_by_length"]] == [512, 1024, 4096]
    assert dict(one.points["backward/time_us_by_length"]) == {512: 250.0, 1024: 250.0, 4096: 250.0}
    assert one.params["backend"] == "flash" and one.params["causal"] == "True" and "q_len" not in one.params


@needs_mlflow
def test_steps_are_lengths_and_jobs_stay_what_they_were(ready: Path) -> None:  # noqa: F811
    from mlflow import MlflowClient

    below = store(ready, records(512, 1024, 4096))
    assert (len(of_kind(below, "curve")), len(of_kind(below, "job"))) == (4, 12)
    client = MlflowClient(config(ready)["uri"])
    run = next(run for run in below if run.info.run_name == "flash · causal")
    history = client.get_metric_history(run.info.run_id, "forward/time_us_by_length")
    assert [(one.step, one.value) for one in history] == [(512, 5120.0), (1024, 10240.0), (4096, 40960.0)]
    assert run.info.status == "FINISHED" and run.data.params["causal"] == "True"
    # MLflow draws these on the sweep's own page.
    parent, _ = runs_of(ready)
    history = client.get_metric_history(parent.info.run_id, "forward/tflops/flash causal")
    assert [one.step for one in history] == [512, 1024, 4096]
    # What reads jobs reads jobs alone.
    assert len(load("first", uri=config(ready)["uri"]).results) == 12


@needs_mlflow
def test_the_same_sweep_again_doubles_no_curve_and_a_longer_one_replaces_them(ready: Path) -> None:  # noqa: F811
    first = {run.info.run_id for run in of_kind(store(ready, records(512, 1024)), "curve")}
    assert {run.info.run_id for run in of_kind(store(ready, records(512, 1024)), "curve")} == first
    longer = of_kind(store(ready, records(512, 1024, 2048)), "curve")
    assert len(longer) == 4 and not first & {run.info.run_id for run in longer}
    assert {run.info.run_name for run in longer} == {
        f"{backend} · {mask}" for backend in ("flash", "cudnn") for mask in ("causal", "full")
    }


@needs_mlflow
def test_plots_lie_in_the_run_as_they_lie_in_the_folder(ready: Path) -> None:  # noqa: F811
    from mlflow import MlflowClient

    plot = ready / "first" / "plots" / "lengths.png"
    plot.parent.mkdir(parents=True)
    plot.write_bytes(b"PNG")
    assert logged(ready, files=[plot]) is None
    parent, _ = runs_of(ready)
    listed = MlflowClient(config(ready)["uri"]).list_artifacts(parent.info.run_id, "plots")
    assert [one.path for one in listed] == ["plots/lengths.png"]


def drawn(sweep: Sweep, said: list[str]) -> tuple[list[Path], Sequence[Curve]]:
    return closing.plots_and_curves(sweep, closing.ranked_rivals(sweep, said.append), said.append)


def test_a_sweep_s_end_draws_into_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    # A busy machine draws slowly.
    monkeypatch.setattr(closing, "LIMIT_S", 60.0)
    said: list[str] = []
    sweep = sweeps.sweep(tmp_path / "a", records(512, 1024))
    plots, found = drawn(sweep, said)
    assert {path.parent for path in plots} == {tmp_path / "a" / "plots"} and len(found) == 4 and said == []
    # The report shows the plots that lie in the folder, and begins with the answer.
    ranked = closing.ranked_rivals(sweep, said.append)
    (report,) = closing.write_report(ranked, plots, tmp_path / "a", said.append)
    page = report.read_text()
    (headline, *_) = ranked.answer.headline()
    assert report == tmp_path / "a" / "report.html" and 2 * page.count("<svg") == len(plots) > 0
    assert ranked.answer.ties and headline in page
    assert "lengths.svg" in {path.name for path in plots}
    alone = sweeps.sweep(tmp_path / "b", records(512, backends=("flash",))[:1])
    assert drawn(alone, said) == ([], []) and said == []


@pytest.mark.parametrize("missing", [True, False])
def test_an_impossible_curve_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: bool) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no room\nfor it")

    if missing:
        monkeypatch.setattr("attn_exp.plots.all.available", lambda: False)
    else:
        monkeypatch.setattr("attn_exp.plots.all.write_charts", broken)
    said: list[str] = []
    plots, found = drawn(sweeps.sweep(tmp_path / "a", records(512, 1024)), said)
    assert (plots, len(found), len(said)) == ([], 4, 1)
    assert said[0].startswith("no plots: ") and ("pip install" in said[0] if missing else said[0].endswith("no room"))
