"""What MLflow's page of a sweep says: its answer, links that lead somewhere, counts, means, and where jobs stand."""

import contextlib
import importlib.util
import re
import shutil
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import sweeps
from test_tracker_mlflow import config, migrated, place, ready, runs_of  # noqa: F401

from attn_exp.commands.log import main as log_main
from attn_exp.comparison.answer import compare_read
from attn_exp.comparison.choice import Choice
from attn_exp.comparison.pages import page
from attn_exp.comparison.rivals import Rivals
from attn_exp.comparison.standing import standings
from attn_exp.core.record.record import Record
from attn_exp.core.sheet.render import text_of
from attn_exp.execution import closing
from attn_exp.execution.summary import summary_of
from attn_exp.results.read import Sweep, read_folder
from attn_exp.tracking import SweepInfo, make_tracker
from attn_exp.tracking.base import Curve
from attn_exp.tracking.page import NOTE, run_page

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="needs mlflow")

LENGTHS = (512, 1024)
LATER = sweeps.NOON + 9
# By backend, microseconds of a forward a token; flash begins first.
SPEEDS = {"flash": 0.2, "cudnn": 0.1, "math": 0.8}


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    # A busy machine draws slowly.
    monkeypatch.setattr(closing, "LIMIT_S", 60.0)


def rows(*lengths: int, sweep: str = "first") -> list[Record]:
    """A sweep whose winner is cudnn: twice as fast as flash, eight times as math."""
    found = []
    for number, (backend, us) in enumerate(SPEEDS.items()):
        for length in lengths:
            one = sweeps.job(backend, us * length, None, of=sweeps.case(seq_len=length))
            request = replace(one.request, sweep=sweep)
            found.append(replace(one, request=request, started_at=sweeps.NOON + number))
    return found


def quiet(line: str) -> None:
    raise AssertionError(line)


def ended(folder: Path, records: list[Record]) -> tuple[Sweep, Rivals | None, list[Path], Sequence[Curve]]:
    """Write a sweep as its end leaves it."""
    sweeps.write(folder, records)
    sweep = read_folder(folder)
    rivals = closing.ranked_rivals(sweep, quiet)
    files, curves = closing.plots_and_curves(sweep, rivals, quiet)
    return sweep, rivals, [*files, *closing.write_report(rivals, files, folder, quiet)], curves


def live(home: Path, records: list[Record], name: str = "first") -> tuple[Any, dict[str, Any], str | None]:
    """Store a sweep as its command does; its run, those of its jobs by job, and where to look at it."""
    sweep, rivals, files, curves = ended(home / name, records)
    tracker = make_tracker(config(home))
    tracker.open(SweepInfo(name, home / name, ""))
    for record in records:
        tracker.log(record, home / name / record.request.job)
    summary = summary_of(sweep.results, rivals, quiet)
    assert tracker.close("FINISHED", replace(summary, files=files, curves=curves)) is None
    parent, children = runs_of(home, name)
    return parent, {run.data.tags.get("attn_exp.job", run.info.run_name): run for run in children}, tracker.look()


def words(home: Path) -> list[str]:
    """The words with which a command finds this store."""
    return [f"tracker.{key}={value}" for key, value in config(home).items() if key in ("uri", "artifacts")]


def rivals_of(folder: Path, records: list[Record]) -> Rivals:
    found = compare_read(Choice(), [sweeps.sweep(folder, records)])
    assert isinstance(found, Rivals)
    return found


def test_each_row_stands_over_the_baseline(tmp_path: Path) -> None:
    found = standings(rivals_of(tmp_path / "a", rows(*LENGTHS)))
    assert found.baseline == "flash"
    by_backend = {job.partition("-")[0]: own for job, own in found.of_jobs.items()}
    assert {name: own["forward/rank"] for name, own in by_backend.items()} == {"cudnn": 1, "flash": 2, "math": 3}
    assert by_backend["cudnn"]["forward/speedup"] == pytest.approx(2)
    assert by_backend["math"]["forward/speedup"] == pytest.approx(0.25)
    whole = {one.label: (one.speedup, one.n, one.best) for one in found.backends}
    assert whole["cudnn"] == (pytest.approx(2), 2, 2) and whole["math"] == (pytest.approx(0.25), 2, 0)
    # A list is sorted by case, and of a case the fastest comes first.
    order = sorted(found.of_jobs, key=lambda job: found.of_jobs[job]["list_place"])
    assert [job.partition("-")[0] for job in order] == ["cudnn", "flash", "math"] * len(LENGTHS)
    lengths = {record.request.job: record.request.case.q_len for record in rows(*LENGTHS)}
    assert [lengths[job] for job in order] == [length for length in sorted(LENGTHS) for _ in range(3)]


def test_a_mean_over_fewer_cases_says_so_and_stands_below_the_others(tmp_path: Path) -> None:
    records = [one for one in rows(*LENGTHS) if (one.request.backend["name"], one.request.case.q_len) != ("cudnn", 512)]
    rivals = rivals_of(tmp_path / "a", records)
    found = standings(rivals)
    assert [(one.label, one.n, one.cases) for one in found.backends] == [
        ("flash", 2, 2),
        ("math", 2, 2),
        ("cudnn", 1, 2),
    ]
    assert re.search(r"forward +cudnn +1 of 2 ", text_of(page(rivals)))
    metrics = summary_of([row.cell.result for row in rivals.rows], rivals, quiet).metrics
    assert metrics["forward/speedup/cudnn cases"] == 1 and metrics["forward/speedup/math cases"] == 2


def test_a_store_that_was_moved_says_where_its_files_are_until_that_is_there_again(
    ready: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    live(ready, rows(*LENGTHS))
    assert log_main([str(ready / "first"), *words(ready)]) == 0
    assert "which is not there" not in capsys.readouterr().err
    gone = ready / "a place"
    said = f"MLflow's experiment attn_exp has its files in {gone}, which is not there"
    for number, location in enumerate((str(gone), gone.as_uri())):
        # As the database is after its folder was moved.
        with contextlib.closing(sqlite3.connect(ready / "mlflow.db")) as database:
            database.execute("UPDATE experiments SET artifact_location = ? WHERE name = 'attn_exp'", (location,))
            database.commit()
        assert log_main([str(ready / "first"), *words(ready)]) == 0
        told = capsys.readouterr().err
        assert told.startswith(said)
        # A sweep that is measured there says it, too.
        tracker = make_tracker(config(ready))
        tracker.open(SweepInfo(f"second{number}", ready / f"second{number}", ""))
        assert tracker.close("FINISHED") is None and (tracker.note() or "").startswith(said)


def test_the_page_of_a_sweep_begins_with_the_answer_and_every_link_leads_to_a_file(ready: Path) -> None:  # noqa: F811
    pytest.importorskip("matplotlib")
    parent, _, look = live(ready, rows(*LENGTHS))
    note = parent.data.tags[NOTE]
    headline = rivals_of(ready / "again", rows(*LENGTHS)).answer.headline()[0]
    assert note.replace("\\", "").startswith(f"**{headline}")
    # The table of the answer, winners in bold.
    assert re.search(r"^\| +512 \| forward +\| .*\*\*", note, re.MULTILINE)
    assert parent.data.tags["attn_exp.answer"].startswith(headline)
    assert "6 jobs: 6 ok" in note
    links = re.findall(
        r"\[([^]]+)\]\(#/experiments/(\d+)/runs/(\w+)/artifacts/([^)?]+)\?workflowType=machine_learning\)", note
    )
    assert {words for words, *_ in links} >= {"report", "heatmap", "lengths"}
    root = Path(parent.info.artifact_uri.removeprefix("file://"))
    for _, experiment, run, name in links:
        assert (experiment, run) == (parent.info.experiment_id, parent.info.run_id)
        assert (root / unquote(name)).stat().st_size > 0
    assert look == f"with: attn-exp ui first uri=sqlite:///{ready}/mlflow.db"
    assert parent.data.metrics.items() >= {
        "jobs": 6, "jobs/ok": 6, "list_place": 0,
        "forward/speedup/cudnn": 2, "forward/best_in/cudnn": 2,
    }.items()  # fmt: skip
    assert "forward/best_in/math" not in parent.data.metrics
    assert parent.data.params["batch"] == "4" and "seq_len" not in parent.data.params
    assert parent.data.tags["attn_exp.baseline"] == "flash"


def test_a_replay_says_the_same_of_a_sweep_as_its_own_command(
    ready: Path,  # noqa: F811
    migrated: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    records = rows(*LENGTHS)
    parent, jobs, _ = live(ready, records)
    (ready / "replayed").mkdir()
    shutil.copyfile(migrated, ready / "replayed" / "mlflow.db")
    # A folder that came without them gets its report, its tables and its plots.
    (ready / "first" / "report.html").unlink()
    shutil.rmtree(ready / "first" / "plots")
    assert log_main(["./first", *words(ready / "replayed")]) == 0, capsys.readouterr()
    again, children = runs_of(ready / "replayed")
    assert again.data.metrics == parent.data.metrics and again.data.params == parent.data.params
    own = (parent.info.run_id, parent.info.experiment_id), (again.info.run_id, again.info.experiment_id)
    notes = [
        run.data.tags[NOTE].replace(f"experiments/{number}/runs/{name}", "")
        for run, (name, number) in zip((parent, again), own, strict=True)
    ]
    assert "table.csv" in notes[1] and notes[0] == re.sub(r"\[all rows\]\([^)]*\) · ", "", notes[1])
    assert len(children) == len(jobs) == 6 + len(SPEEDS)
    for run in children:
        before = jobs[run.data.tags.get("attn_exp.job", run.info.run_name)]
        assert (run.data.metrics, run.data.params) == (before.data.metrics, before.data.params)
        assert run.data.tags["mlflow.runColor"] == before.data.tags["mlflow.runColor"]
        assert (
            run.data.tags["attn_exp.kind"] == "curve" or {"forward/rank", "forward/speedup"} <= run.data.metrics.keys()
        )


def test_a_sweep_that_was_continued_says_what_holds_now(ready: Path) -> None:  # noqa: F811
    records = rows(512)
    live(ready, records)
    # Another length, at which math is the fastest; and another batch: a parameter cannot be taken back.
    more = [
        replace(one, request=replace(one.request, sweep="first"), started_at=LATER, finished_at=LATER)
        for one in [
            sweeps.job(name, us, None, of=sweeps.case(seq_len=1024, batch=2))
            for name, us in (("flash", 100.0), ("cudnn", 200.0), ("math", 50.0))
        ]
    ]
    parent, jobs, _ = live(ready, [*records, *more])
    # Of no backend's colour, which MLflow might choose.
    assert parent.data.tags["mlflow.runColor"] == "#808080"
    assert parent.data.metrics["jobs"] == 6 and parent.data.metrics["forward/speedup/cudnn"] == pytest.approx(1)
    assert parent.data.tags["attn_exp.no_longer_shared"] == "batch, seq_len"
    assert parent.data.tags[NOTE].count("math is") == 1
    assert jobs[more[2].request.job].data.metrics["forward/rank"] == 1


def test_a_job_s_page_says_where_it_stands(ready: Path) -> None:  # noqa: F811
    records = rows(512)
    records[1] = replace(records[1], flags=("busy_host",))
    parent, jobs, _ = live(ready, [*records, sweeps.failed(backend="flex", of=records[0].request.case)])
    by_backend = {run.data.params["backend"]: run.data.tags for run in jobs.values()}
    answer = f"[the sweep's answer]({run_page(parent.info.experiment_id, parent.info.run_id)})"
    assert by_backend["math"][NOTE] == (
        f"forward: **409.6 us**, 10.51 TFLOPS; rank 3 of 3 on this case, 0.25 times as fast as flash  \n{answer}"
    )
    assert by_backend["cudnn"][NOTE].startswith("forward: **51.2 us**, 84.05 TFLOPS; rank 1 of 3 on this case, 2.00")
    assert by_backend["cudnn"]["attn_exp.flags"] == "busy_host"
    assert by_backend["flex"][NOTE] == f"**unsupported: no kernel for it**  \n{answer}"


def test_words_of_records_cannot_become_links_or_markup(tmp_path: Path) -> None:
    bad = "[x](http://evil) <img src=x> |"
    records = [*rows(512), sweeps.failed(backend="eager", reason=bad)]
    sweep = sweeps.sweep(tmp_path / "a", records)
    found = summary_of(sweep.results, closing.ranked_rivals(sweep, quiet), quiet)
    assert "eager unsupported" in found.description
    assert "](http" not in found.description.replace("\\]", "") and "<img" not in found.description
