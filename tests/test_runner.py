"""A job's folder from its submitting to its record, with a worker that does as it is told."""

from collections import deque
from dataclasses import replace

import pytest
from fakes import make_record, make_request

from attn_exp.core.record.file import read_record, write_record
from attn_exp.core.record.profile import Profile
from attn_exp.execution.job_queue import JobQueue
from attn_exp.execution.worker import Outcome
from attn_exp.results.store import done_record

REQUEST = replace(make_request(), profilers=({"name": "ncu", "_target_": "x.Y"},))
TIMED = replace(make_record(request=make_request()), started_at=1.0, finished_at=2.0)


class Worker:
    """Answers for each job by what `outcomes` say, after doing what comes with it to the job's folder."""

    def __init__(self, *answers):
        self.answers, self.folders = deque(answers), deque()

    def submit(self, *folders, beside=None):
        self.folders.extend(folders)

    def wait(self, stage):
        folder = self.folders.popleft()
        record, outcome = self.answers.popleft()
        if record is not None:
            write_record(record, folder)
        return replace(outcome, folder=folder)


def over(folder, *answers, request=REQUEST):
    runner = JobQueue(Worker(*answers), folder)
    runner.submit([request])
    assert runner.has(request.job) and runner.waiting == 1
    return runner.record(runner.wait())


def outcome(status=None, reason=None, profiling=False):
    return Outcome("", status, reason, profiling)


@pytest.fixture
def folder(tmp_path):
    """A sweep with a job that has been measured, and profiled by torch."""
    own = tmp_path / REQUEST.job
    (own / "profiles" / "torch").mkdir(parents=True)
    (own / "profiles" / "torch" / "kernels.csv").write_text("kept")
    write_record(replace(TIMED, profiles={"torch": Profile(status="ok")}), own)
    return tmp_path


def test_a_final_record_stays_while_its_job_is_measured_anew_for_a_profile(folder):
    assert done_record(REQUEST, folder / REQUEST.job) is None, "it lacks a profile"
    runner = JobQueue(Worker(), folder)
    runner.submit([REQUEST])
    assert read_record(folder / REQUEST.job).metrics == TIMED.metrics
    assert (folder / REQUEST.job / "profiles" / "torch" / "kernels.csv").exists()


@pytest.mark.parametrize("status", ["crashed", None])
def test_numbers_are_not_lost_to_a_profile_that_could_not_be_had(folder, status):
    record = over(folder, (None, outcome(status, status and "the worker was killed by SIGSEGV")))
    assert record == read_record(folder / REQUEST.job)
    assert (record.status, record.metrics, record.finished_at) == ("ok", TIMED.metrics, 2.0)
    assert record.profiles["torch"].status == "ok"
    ended = status or "error"
    assert record.profiles["ncu"].reason.startswith(f"repeating the job for it ended as {ended}: the worker")
    assert done_record(REQUEST, folder / REQUEST.job) == record


def test_a_new_measurement_replaces_all_of_the_old_one(folder):
    anew = replace(TIMED, request=REQUEST, finished_at=3.0, profiles={"ncu": Profile(status="ok")})
    assert over(folder, (anew, outcome())) == anew
    assert [path.name for path in (folder / REQUEST.job / "profiles").iterdir()] == []


@pytest.mark.parametrize("status", ["crashed"])
def test_a_worker_that_dies_after_its_record_was_written_has_lost_nothing(tmp_path, status):
    assert over(tmp_path, (TIMED, outcome(status, "it was killed")), request=make_request()) == TIMED


def test_a_profiler_that_dies_costs_its_profile_alone(tmp_path):
    record = over(tmp_path, (replace(TIMED, request=REQUEST), outcome("timeout", "too long", profiling=True)))
    assert (record.status, record.profiles["ncu"].reason) == ("ok", "too long")


def test_a_failure_leaves_nothing_of_an_earlier_failure(tmp_path):
    own = tmp_path / REQUEST.job
    (own / "profiles" / "torch").mkdir(parents=True)
    write_record(make_record(request=REQUEST, status="error", reason="before", passes={}, metrics={}), own)
    record = over(tmp_path, (None, outcome("crashed", "now")))
    assert (record.status, record.reason) == ("crashed", "now")
    assert not (own / "profiles").exists()


def test_profiles_that_are_a_link_are_not_followed(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "theirs").write_text("kept")
    (tmp_path / "s" / REQUEST.job).mkdir(parents=True)
    (tmp_path / "s" / REQUEST.job / "profiles").symlink_to(tmp_path / "outside")
    over(tmp_path / "s", (None, outcome("crashed", "now")))
    assert not (tmp_path / "s" / REQUEST.job / "profiles").exists()
    assert (tmp_path / "outside" / "theirs").read_text() == "kept"


def test_a_record_elsewhere_or_of_another_job_is_not_taken_for_done(tmp_path):
    request = make_request()
    outside, sweep = tmp_path / "outside", tmp_path / "sweep"
    for place in (outside, sweep):
        place.mkdir()
    write_record(TIMED, outside)
    (sweep / request.job).symlink_to(outside)
    assert done_record(request, sweep / request.job) is None
    other = replace(request, job=f"{request.job}x")
    (sweep / other.job).mkdir()
    write_record(TIMED, sweep / other.job)
    assert done_record(other, sweep / other.job) is None
