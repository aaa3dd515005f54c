"""The session by itself: what it does when the end or the choices are not as they should be."""

import io
from dataclasses import replace

import pytest
import sweeps
from fakes import make_record

from attn_exp.commands import run as run_module
from attn_exp.comparison.answer import compare_read
from attn_exp.comparison.choice import Choice
from attn_exp.comparison.pages import page
from attn_exp.core.sheet.render import text_of
from attn_exp.execution import closing
from attn_exp.execution.context import SweepContext
from attn_exp.execution.progress import Progress
from attn_exp.execution.session import Session
from attn_exp.execution.summary import summary_of
from attn_exp.results import read as read_module
from attn_exp.results.store import keep_planned
from attn_exp.tracking.base import Tracker


class Closed(Tracker):
    def __init__(self):
        self.ends = []

    def close(self, status, *arguments, **more):
        self.ends.append(status)


@pytest.fixture
def current(tmp_path):
    found = Session()
    found.context, found._output = SweepContext("s", tmp_path, Closed(), {}, print), closing.Output(save_plots=False)
    found.progress = Progress(io.StringIO())
    return found


def test_whatever_fails_at_the_end_the_store_is_closed(current, monkeypatch):
    def broken(folder, **options):
        raise RuntimeError("no table")

    monkeypatch.setattr(closing, "read_folder", broken)
    with pytest.raises(RuntimeError, match="no table"):
        current.close("FINISHED")
    assert current.context.tracker.ends == ["FAILED"]


def test_an_interrupt_while_the_end_is_stored_says_the_command_that_stores_it(current, monkeypatch, capsys):
    def interrupted(folder, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(closing, "read_folder", interrupted)
    current.context.tracker.replay_command = lambda: "attn-exp log s"
    with pytest.raises(KeyboardInterrupt):
        current.close("FINISHED")
    assert "what is missing is stored with: attn-exp log s" in current.progress._stream.getvalue()


def test_a_stopped_sweep_says_of_how_many_jobs_it_has_records_until_it_has_all(current, tmp_path):
    sweeps.write(tmp_path, [sweeps.job("math"), sweeps.job("flash")])
    current.progress.total = 5
    current.close("KILLED")
    stopped = read_module.read_folder(tmp_path)
    assert (stopped.planned, repr(stopped).partition(" (")[0].partition(": ")[2]) == (5, "2 of 5 records")
    found = compare_read(Choice(), [stopped])
    warned = page(found).headline.warnings
    for form in ("table", "markdown", "html"):
        assert f"{tmp_path.name}: 2 of 5 records, " in " ".join(text_of(page(found), form).replace("\\_", "_").split())
    assert f"{tmp_path.name}: 3 of 5 jobs have no record yet; its command measures them" in warned
    summary = summary_of(stopped.results, None, print, stopped.planned)
    assert summary.description == "2 of 5 jobs: 2 ok"
    # One job that is added to a sweep is no plan of its own, nor is a file that says nothing.
    for total, text, planned in ((1, "5", 5), (2, "5", 2), (1, "many", None), (1, "9" * 5000, None), (1, "-1", None)):
        (tmp_path / "planned.txt").write_text(text)
        keep_planned(tmp_path, total)
        assert read_module.read_folder(tmp_path).planned == planned
    (tmp_path / "planned.txt").write_text("2")
    whole = read_module.read_folder(tmp_path)
    assert ": 2 records (" in repr(whole) and not page(compare_read(Choice(), [whole])).headline.warnings
    assert summary_of(whole.results, None, print, whole.planned).description == "2 jobs: 2 ok"


@pytest.mark.parametrize(
    ("words", "status", "code"),
    [([], "unavailable", 1), ([], "unsupported", 0), ([], "ok", 0), (["-m"], "unavailable", 0)],
)
def test_one_case_that_another_attempt_may_measure_is_no_success(monkeypatch, tmp_path, words, status, code):
    def measured(arguments, session):
        session.progress.total = 1
        session.context = SweepContext("s", tmp_path, Closed(), {}, print)
        record = make_record()
        changes = {} if status == "ok" else {"status": status, "reason": "because", "metrics": {}, "passes": {}}
        session.finish(replace(record, **changes))
        return 0

    monkeypatch.setattr(run_module, "_measure", measured)
    monkeypatch.setattr(Session, "close", lambda *_: None)
    assert run_module.main([*words, "isolation=none", "backend=flash"]) == code
