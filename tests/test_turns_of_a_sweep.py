"""Jobs of a case are measured in turns: what a sweep's records show of it. Real commands, on a CPU."""

import json
import shutil
from pathlib import Path

import pytest
from cli import QUICK, complaints, left_behind, run

from attn_exp.core.record.file import FILE_NAME
from attn_exp.core.record.record import Record
from attn_exp.results.read import read_folder

BAD = {"segfaults": "crashed", "diesintime": "crashed", "hangs": "timeout"}


def choose(folder: Path) -> None:
    """Write a choice of `backend=` for each backend that is of this file alone."""
    own = folder / "conf" / "backend"
    own.mkdir(parents=True)
    for name, target in (
        ("diesintime", "crashers.SegfaultsLater"),
        ("hangswhenmade", "crashers.HangsWhenMade"),
        ("wrong", "fakes.NoMask"),
    ):
        (own / f"{name}.yaml").write_text(f"_target_: {target}\nname: {name}\n")


def sweep(cwd: Path, *words: str) -> list[Record]:
    """Run `-m` with these words; the records of its sweep in the order in which they ended."""
    ran = run("-m", *QUICK, *words, "hydra.searchpath=[file://conf]", cwd=cwd)
    assert (ran.returncode, complaints(ran)) == (0, []), ran.stdout + ran.stderr
    (name,) = [word.partition("=")[2] for word in words if word.startswith("sweep=")]
    return found(cwd, name)


def found(cwd: Path, name: str) -> list[Record]:
    read = read_folder(cwd / "multirun" / name)
    assert not read.broken
    return sorted(read.records(), key=lambda record: record.finished_at)


def names(records: list[Record]) -> list[tuple[str, int]]:
    return [(record.request.backend["name"], record.request.case.batch) for record in records]


def base(record: Record) -> str | None:
    """The job with which a record's forward is compared in turns."""
    paired = record.passes["forward"].paired
    return None if paired is None else paired.base


def of(records: list[Record], backend: str, batch: int = 1) -> Record:
    (one,) = [record for record in records if names([record]) == [(backend, batch)]]
    return one


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `s`, of two backends and two batches."""
    folder = tmp_path_factory.mktemp("home")
    choose(folder)
    sweep(folder, "backend=flash,math", "batch=1,2", "sweep=s")
    return folder


@pytest.fixture
def s(home: Path, tmp_path: Path) -> Path:
    """A copy of that folder, to change."""
    return Path(shutil.copytree(home, tmp_path / "home"))


def test_cases_follow_each_other_whatever_the_order_of_the_overrides(home: Path) -> None:
    for records in (found(home, "s"), sweep(home, "batch=1,2", "backend=flash,math", "sweep=t")):
        assert [batch for _, batch in names(records)] == [1, 1, 2, 2]
        assert all(record.status == "ok" and "apart" not in record.flags for record in records)
        cases = [records[:2], records[2:]]
        bases = [{base(record) for record in case} for case in cases]
        assert [len(one) for one in bases] == [1, 1]
        assert all(one < {record.request.job for record in case} for one, case in zip(bases, cases, strict=True))


def test_one_that_fails_costs_the_others_of_its_case_nothing(home: Path) -> None:
    choice = ",".join(["flash", *BAD, "math"])
    records = sweep(home, f"backend={choice}", "isolation.timeout_s=10", "sweep=bad")
    assert {record.request.backend["name"]: record.status for record in records} == BAD | {"flash": "ok", "math": "ok"}
    flash, math = of(records, "flash"), of(records, "math")
    # All that stood were timed together when one died: any of them might have been to blame.
    assert all("apart" in record.flags and base(record) is None for record in (flash, math))


def test_suspects_take_turns_again_once_one_of_them_is_found_to_be_to_blame(home: Path) -> None:
    records = sweep(home, "backend=flash,diesintime,math,eager", "sweep=acquitted")
    flash, dies, math, eager = (of(records, name) for name in ("flash", "diesintime", "math", "eager"))
    assert ("apart" in flash.flags, dies.status) == (True, "crashed")
    assert base(math) == base(eager) is not None and "apart" not in (*math.flags, *eager.flags)


@pytest.mark.parametrize("bad", ["segfaults", "hangs", "hangswhenmade"])
def test_those_that_do_not_fail_take_turns_if_it_is_known_who_did(home: Path, bad: str) -> None:
    records = sweep(home, f"backend=flash,{bad},math", "isolation.timeout_s=10", f"sweep=known_{bad}")
    assert of(records, bad).status == BAD.get(bad, "timeout")
    flash, math = of(records, "flash"), of(records, "math")
    assert flash.status == math.status == "ok"
    assert base(flash) == base(math) in (flash.request.job, math.request.job)
    assert "apart" not in (*flash.flags, *math.flags)


def test_a_rival_that_is_added_is_compared_with_the_fastest_that_was_there(s: Path) -> None:
    before = {path: path.read_bytes() for path in s.glob(f"multirun/s/*/{FILE_NAME}")}
    old = [record for record in found(s, "s") if record.request.case.batch == 1]
    fastest = min(old, key=lambda record: record.metrics["forward/time_us"])
    records = sweep(s, "backend=flash,math,eager", "sweep=s")
    assert {path: path.read_bytes() for path in before} == before
    paired = of(records, "eager").passes["forward"].paired
    assert paired is not None and paired.timing is not None
    assert paired.base == fastest.request.job
    assert len(paired.timing.times_us) > 1 and paired.log_ratio is not None


def test_a_case_that_was_left_half_done_is_finished_by_what_is_missing(s: Path) -> None:
    before = {path: path.read_bytes() for path in s.glob(f"multirun/s/*/{FILE_NAME}")}
    gone = s / "multirun" / "s" / of(found(s, "s"), "math").request.job
    shutil.rmtree(gone)
    sweep(s, "backend=flash,math", "batch=1,2", "sweep=s")
    after = {path: path.read_bytes() for path in before}
    assert [path.parent for path in before if after[path] != before[path]] == [gone]


def test_a_record_of_another_method_is_measured_again_and_kept(s: Path) -> None:
    path = s / "multirun" / "s" / of(found(s, "s"), "math").request.job / FILE_NAME
    older = json.dumps(json.loads(path.read_bytes()) | {"method_version": "4"})
    path.write_text(older)
    records = sweep(s, "backend=flash,math", "batch=1,2", "sweep=s")
    assert {record.method_version for record in records} == {"5"}
    assert len(records) == 4
    assert path.with_name("record.method-4.json").read_text() == older
    assert [one.parent.name for one in s.glob("multirun/s/*/record.method-*")] == [path.parent.name]


def test_fresh_jobs_are_marked_as_measured_apart_and_those_of_this_process_take_turns(home: Path) -> None:
    made = {name: sweep(home, "backend=flash,cudnn,math", f"isolation={name}", f"sweep={name}")
            for name in ("fresh", "none")}  # fmt: skip
    for records in made.values():
        statuses = {record.request.backend["name"]: record.status for record in records}
        assert statuses == {"flash": "ok", "cudnn": "unsupported", "math": "ok"}
    assert left_behind(home) == []
    fresh, none = ([of(records, name) for name in ("flash", "math")] for records in made.values())
    assert all("apart" in record.flags and base(record) is None for record in fresh)
    assert not any("apart" in record.flags for record in none)
    assert base(none[0]) == base(none[1]) is not None


def test_stop_on_keeps_the_records_of_the_whole_case(home: Path) -> None:
    words = ("-m", *QUICK, "hydra.searchpath=[file://conf]", "backend=wrong,flash", "batch=1,2", "sweep=stopped")
    # Typed again it neither goes on behind that case nor ends as if all were well.
    for _ in range(2):
        ran = run(*words, "stop_on=[inaccurate]", cwd=home)
        assert (ran.returncode, complaints(ran)) == (1, [])
        assert "stopped at the first inaccurate job (stop_on), wrong-" in ran.stdout
        records = found(home, "stopped")
        assert sorted(names(records)) == [("flash", 1), ("wrong", 1)]
        assert (of(records, "wrong").status, of(records, "flash").status) == ("inaccurate", "ok")
