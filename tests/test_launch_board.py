"""What a sweep's parent and its tasks tell each other, without any process."""

import os
import re
import socket
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import CASE, make_request

from attn_exp.core.errors import UserError
from attn_exp.core.nvml import GpuInfo
from attn_exp.core.record import Record
from attn_exp.core.record_file import read_record, write_record
from attn_exp.run.context import SweepContext
from attn_exp.run.gpus import try_lease
from attn_exp.run.session import Session
from attn_exp.sweep import board as board_module
from attn_exp.sweep import parallel as sweep_module
from attn_exp.sweep.board import GONE_S, Board, Line, TaskBoard, running_elsewhere
from attn_exp.sweep.parallel import _check_alone
from attn_exp.sweep.plan import Group, LaunchPlan, group_jobs, read_plan, write_plan
from attn_exp.sweep.task import _lease, _own, _requests
from attn_exp.tracking.none import NoTracker


@pytest.fixture
def board(tmp_path):
    found = Board(tmp_path / ".launch" / "one")
    found.open()
    return found


def request(backend, **changes):
    case = replace(CASE, **changes)
    return replace(make_request(case=case), job=f"{backend}-{case.label().replace(' ', '-')}")


def test_rivals_of_a_case_are_one_group_and_the_longest_comes_first():
    asked = [request(name, batch=batch) for batch in (1, 4, 2) for name in ("a", "b")]
    groups = group_jobs([*asked, asked[0]], {asked[2].case: "GPU-1", asked[0].case: None})
    assert [[job.job[0] for job in group.jobs] for group in groups] == [["a", "b"]] * 3
    assert [group.jobs[0].case.batch for group in groups] == [4, 2, 1]
    assert [group.gpu_uuid for group in groups] == ["GPU-1", None, None]


def test_a_plan_is_read_as_it_was_written(tmp_path):
    groups = group_jobs([request("a", batch=2), request("b", batch=2, lengths=None)], {})
    plan = LaunchPlan(
        folder="f", cwd="/", isolation={"name": "warm", "timeout_s": None}, groups=groups, gpus=("GPU-1",)
    )
    write_plan(plan, tmp_path)
    assert read_plan(tmp_path) == plan
    assert plan.jobs == 2


def test_each_group_is_taken_once_and_none_that_belongs_to_another_gpu(board):
    groups = tuple(Group(jobs=(request(str(index)),), gpu_uuid=gpu) for index, gpu in enumerate((None, "A", "B", None)))
    plan = LaunchPlan(folder="f", cwd="/", isolation={}, groups=groups)
    assert _own(plan, "A") == [1, 0, 3]
    assert _own(plan, None) == [0, 3]
    first, second = TaskBoard(board.folder, 0), TaskBoard(board.folder, 1)
    mine, theirs = _requests(plan, first, "A"), _requests(plan, second, "B")
    taken = [next(mine).job[0], next(theirs).job[0], next(mine).job[0], next(theirs).job[0]]
    assert taken == ["1", "2", "0", "3"]
    assert list(mine) == list(theirs) == []
    assert first.taken(3)


def test_lines_come_once_and_whole(board, monkeypatch):
    seats = [TaskBoard(board.folder, task) for task in (0, 1)]
    seats[1].append("hello", "node7")
    seats[0].append("begin", "flash-1")
    assert board.lines(3) == [Line(0, "begin", "flash-1"), Line(1, "hello", "node7")]
    with (board.folder / "task-0").open("a") as file:
        file.write("end flash-1\nend fla")
        file.flush()
        assert board.lines(3) == [Line(0, "end", "flash-1")]
        file.write("sh-2\n")
    with monkeypatch.context() as away:
        away.setattr(board_module, "_task_file", lambda *_: Path("/proc/self/mem/not-there"))
        assert board.lines(3) == []
    assert board.lines(3) == [Line(0, "end", "flash-2")]
    assert board.lines(3) == []


def test_a_task_ends_when_its_parent_says_so_dies_or_takes_the_folder_away(board, monkeypatch):
    seat = TaskBoard(board.folder, 0)
    assert seat.should_continue()
    board.beat(stop=True)
    assert not seat.should_continue()
    board.beat()
    assert seat.should_continue()
    monkeypatch.setattr(os, "getpid", lambda: 2**22 + 1)  # above any process
    board.beat()
    assert not seat.should_continue()
    (board.folder / "parent").unlink()
    assert not seat.should_continue()
    (board.folder / "parent").parent.rename(board.folder.with_name("gone"))
    seat.append("bye")
    assert not seat.take(0)


def test_a_parent_on_another_host_is_gone_after_a_minute_without_a_beat(board, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(board_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(socket, "gethostname", lambda: "login")
    board.beat()
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    seat = TaskBoard(board.folder, 0)
    for _ in range(3):
        assert seat.should_continue()
        now[0] += GONE_S - 1
        assert seat.should_continue()
        board.beat()
    assert seat.should_continue()
    now[0] += GONE_S + 1
    assert not seat.should_continue()


def test_a_parent_in_another_container_of_this_host_is_told_by_its_beats(board, monkeypatch):
    """Its number may be that of no process here, or of another one."""
    monkeypatch.setattr(board_module.os, "getpid", lambda: 2**22 + 1)
    board.beat()
    seat = TaskBoard(board.folder, 0)
    assert not seat.should_continue()
    monkeypatch.setattr(board_module, "pid_namespace", lambda: "another")
    assert seat.should_continue() and TaskBoard(board.folder, 1).should_continue()
    monkeypatch.setattr(board_module.time, "sleep", lambda _: None)
    assert not running_elsewhere(board.folder, 0.0)


def test_a_sweep_that_runs_is_not_run_twice_and_what_a_dead_one_left_is_cleared(board, tmp_path, monkeypatch):
    mine = Board(tmp_path / ".launch" / "two")
    mine.open()
    with pytest.raises(UserError, match="another command is running sweep=s"):
        _check_alone(mine.folder, "s")
    # Of two that start at once neither goes on beside the other.
    with pytest.raises(UserError, match="another command is running sweep=s"):
        _check_alone(board.folder, "s")
    # On another host it is told by its beats.
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    assert not running_elsewhere(board.folder, 0.0)
    monkeypatch.setattr(board_module.time, "sleep", lambda _: board.beat())
    assert running_elsewhere(board.folder, 0.0)
    board.beat(stop=True)
    assert not running_elsewhere(board.folder, 0.0)
    _check_alone(mine.folder, "s")
    assert mine.folder.exists()
    assert not board.folder.exists()


def test_a_parent_that_dies_over_its_file_is_missed_all_the_same(board, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(board_module.time, "monotonic", lambda: now[0])
    seat, other = TaskBoard(board.folder, 0), TaskBoard(board.folder, 1)
    assert seat.should_continue()
    (board.folder / "parent").write_text("")
    assert seat.should_continue() and other.should_continue()
    now[0] += GONE_S + 1
    assert not seat.should_continue() and not other.should_continue()


def test_tasks_are_told_to_stop_also_on_a_full_disk(board, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    seat = TaskBoard(board.folder, 0)
    monkeypatch.setattr(Path, "write_text", full)
    board.beat(stop=True)
    assert not seat.should_continue()
    with pytest.raises(OSError, match="No space left"):
        board.beat()


def test_a_record_that_the_file_system_shows_late_is_taken_when_it_shows(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_module, "_UNSEEN_S", 0.05)
    wanted = request("a")
    session = Session()
    session.context = SweepContext("s", tmp_path, NoTracker(), {}, print)
    jobs = sweep_module._Jobs(session, tmp_path, [wanted])
    assert jobs.handle(Line(0, "begin", wanted.job))
    assert jobs.handle(Line(0, "end", wanted.job))
    assert not jobs.over()

    def shown():
        (tmp_path / wanted.job).mkdir()
        now = {"started_at": 1.0, "finished_at": 2.0}
        write_record(Record(request=wanted, status="unsupported", reason="no", **now), tmp_path / wanted.job)

    late = threading.Timer(0.3, shown)
    late.start()
    jobs.record_lost(SimpleNamespace(name="slurm"), {})
    assert jobs.over()
    assert read_record(tmp_path / wanted.job).status == "unsupported"


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """The jobs of a launch of one job, of which the parent has heard nothing, and its record as a task writes it."""
    monkeypatch.setattr(sweep_module, "_UNSEEN_S", 0.02)
    monkeypatch.setattr(sweep_module, "GONE_S", 0.2)
    wanted = request("a")
    (tmp_path / wanted.job).mkdir()

    def made(**changes):
        session = Session()
        session.context = SweepContext("s", tmp_path, NoTracker(), {}, print)
        return sweep_module._Jobs(session, tmp_path, [replace(wanted, **changes)])

    return made, Record(request=wanted, status="unsupported", reason="no", started_at=1.0, finished_at=2.0)


@pytest.mark.parametrize("ended", [{}, {0: "it was killed"}], ids=["all ended well", "one died"])
def test_a_record_that_nobody_was_told_of_is_taken_and_not_written_over(tmp_path, jobs, ended):
    made, record = jobs
    launched = made()
    write_record(record, tmp_path / record.request.job)
    launched.record_lost(SimpleNamespace(name="slurm"), ended)
    assert launched.over() and read_record(tmp_path / record.request.job) == record


def test_a_record_of_an_earlier_try_is_no_record_of_this_one(tmp_path, jobs):
    made, record = jobs
    folder = tmp_path / record.request.job
    write_record(replace(record, status="crashed", reason="before"), folder)
    made().record_lost(SimpleNamespace(name="slurm"), {})
    assert read_record(folder).reason == "all tasks of slurm had ended"
    # A final one that was to get a profile stays.
    write_record(record, folder)
    made(profilers=({"name": "ncu"},)).record_lost(SimpleNamespace(name="slurm"), {})
    found = read_record(folder)
    assert (found.status, found.finished_at) == ("unsupported", 2.0)
    assert found.profiles["ncu"].reason == "repeating the job for it ended as crashed: all tasks of slurm had ended"


def test_a_task_gives_up_a_gpu_that_others_hold_for_too_long_and_says_who(board, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gpu, seat = GpuInfo(1, "NVIDIA H200", "GPU-1"), TaskBoard(board.folder, 0)
    plan = LaunchPlan(folder="f", cwd="/", isolation={}, groups=(Group(jobs=(request("a"),)),), gpu_wait_s=0.0)
    held = try_lease([gpu])
    assert _lease(plan, seat, [gpu]) is None
    waits, gives_up = board.lines(1)
    assert waits == Line(0, "wait", "1 (NVIDIA H200)")
    assert gives_up.word == "held"
    assert re.fullmatch(r"GPU 1 \(NVIDIA H200\) is held by .* for 0 s: end that, .*, or set gpu_wait_s=", gives_up.rest)
    held.release()
    _lease(plan, seat, [gpu]).release()


def test_jobs_whose_gpus_others_hold_have_no_record_and_the_command_ends_with_the_reason(tmp_path):
    """The jobs that another task measured keep theirs."""
    measured, left = request("a"), request("b", batch=7)

    class Held:
        name, tasks, gpus, pinned = "slurm", 2, (), False

        def run(self, launch, tasks, say, over):
            assert read_plan(launch).gpu_wait_s == 5.0
            mine, other = (TaskBoard(launch, task) for task in (0, 1))
            mine.append("held", "GPU 1 is held by process 7")
            now = {"started_at": 1.0, "finished_at": 2.0}
            (tmp_path / measured.job).mkdir()
            write_record(Record(request=measured, status="unsupported", reason="no", **now), tmp_path / measured.job)
            other.append("begin", measured.job)
            return {}

        def close(self):
            pass

    session = Session()
    session.context = SweepContext("s", tmp_path, NoTracker(), {"gpu_wait_s": 5}, print)
    with pytest.raises(UserError, match="GPU 1 is held by process 7"):
        sweep_module.launch(session, Held(), {}, [measured, left], {})
    assert [path.parent.name for path in tmp_path.glob("*/record.json")] == [measured.job]
    assert not (tmp_path / ".launch").exists()


def test_a_process_that_has_another_s_number_is_not_taken_for_it(board):
    # As after the restart of a container: the same host, the same number.
    content = (board.folder / "parent").read_text()
    assert running_elsewhere(board.folder, 0.0)
    (board.folder / "parent").write_text(re.sub(r":\d+", ":1", content))
    assert not running_elsewhere(board.folder, 0.0)


def test_a_parent_that_is_just_writing_is_alive(board, monkeypatch):
    content = (board.folder / "parent").read_text()
    (board.folder / "parent").write_text("")
    monkeypatch.setattr(board_module.time, "sleep", lambda _: (board.folder / "parent").write_text(content))
    assert running_elsewhere(board.folder, 0.0)
