"""Jobs of a case are measured in turns: what a sweep's records show of it. Real commands, on a CPU."""

import json
import shutil
from pathlib import Path

import pytest
from cli import QUICK, complaints, left_behind, run
from inprocess import typed

from attn_exp.core.record.file import FILE_NAME
from attn_exp.core.record.record import Record
from attn_exp.results.read import read_folder


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
    """A folder with `s`, of two backends and three batches."""
    folder = tmp_path_factory.mktemp("home")
    choose(folder)
    sweep(folder, "backend=flash,math", "batch=1,2,3", "sweep=s")
    return folder


def test_cases_follow_each_other_whatever_the_order_of_the_overrides(home: Path) -> None:
    records = found(home, "s")
    assert [batch for _, batch in names(records)] == [1, 1, 2, 2, 3, 3]
    assert all(record.status == "ok" and "apart" not in record.flags for record in records)
    for case in (records[:2], records[2:4], records[4:]):
        (its_base,) = {base(record) for record in case}
        assert its_base in {record.request.job for record in case}


def test_suspects_take_turns_again_once_one_of_them_is_found_to_be_to_blame(home: Path) -> None:
    records = sweep(home, "backend=flash,diesintime,math,eager", "sweep=acquitted")
    flash, dies, math, eager = (of(records, name) for name in ("flash", "diesintime", "math", "eager"))
    # All that stood were timed together when one died: any of them might have been to blame.
    assert ("apart" in flash.flags, base(flash), dies.status) == (True, None, "crashed")
    assert base(math) == base(eager) is not None and "apart" not in (*math.flags, *eager.flags)


def test_those_that_do_not_fail_take_turns_if_it_is_known_who_did(home: Path) -> None:
    bad = {"segfaults": "crashed", "hangswhenmade": "timeout"}
    choice = ",".join(["flash", *bad, "math"])
    records = sweep(home, f"backend={choice}", "isolation.timeout_s=8", "sweep=known")
    assert {record.request.backend["name"]: record.status for record in records} == bad | {"flash": "ok", "math": "ok"}
    flash, math = of(records, "flash"), of(records, "math")
    assert base(flash) == base(math) in (flash.request.job, math.request.job)
    assert "apart" not in (*flash.flags, *math.flags)


def test_a_sweep_that_goes_on_measures_what_is_missing_and_nothing_else(home: Path, tmp_path: Path) -> None:
    s = Path(shutil.copytree(home, tmp_path / "home"))
    old = found(s, "s")
    # Half of a case is gone, and half of another was measured by another method.
    gone, older = (s / "multirun" / "s" / of(old, "math", batch).request.job / FILE_NAME for batch in (2, 3))
    shutil.rmtree(gone.parent)
    text = json.dumps(json.loads(older.read_bytes()) | {"method_version": "4"})
    older.write_text(text)
    before = {path: path.read_bytes() for path in s.glob(f"multirun/s/*/{FILE_NAME}") if path != older}
    records = sweep(s, "backend=flash,math,eager", "batch=1,2,3", "sweep=s")
    assert len(records) == 9 and {record.method_version for record in records} == {"5"}
    assert len(before) == 4 and {path: path.read_bytes() for path in before} == before
    assert older.with_name("record.method-4.json").read_text() == text
    assert [one.parent for one in s.glob("multirun/s/*/record.method-*")] == [older.parent]
    # A rival that is added is compared with the fastest that was there.
    there = [record for record in old if record.request.case.batch == 1]
    paired = of(records, "eager").passes["forward"].paired
    assert paired is not None and paired.timing is not None
    assert paired.base == min(there, key=lambda record: record.metrics["forward/time_us"]).request.job
    assert len(paired.timing.times_us) > 1 and paired.log_ratio is not None


def test_fresh_jobs_are_marked_as_measured_apart(home: Path) -> None:
    records = sweep(home, "backend=flash,cudnn,math", "isolation=fresh", "sweep=fresh")
    statuses = {record.request.backend["name"]: record.status for record in records}
    assert statuses == {"flash": "ok", "cudnn": "unsupported", "math": "ok"}
    assert left_behind(home) == []
    assert all("apart" in of(records, name).flags and base(of(records, name)) is None for name in ("flash", "math"))


def test_jobs_of_this_process_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_exp.worker.__main__.limit_memory", lambda: None)
    words = (*QUICK, "backend=flash,cudnn,math", "isolation=none", "sweep=none")
    assert typed(monkeypatch, tmp_path)("-m", *words)[0] == 0
    records = found(tmp_path, "none")
    assert sorted(record.status for record in records) == ["ok", "ok", "unsupported"]
    flash, math = of(records, "flash"), of(records, "math")
    assert base(flash) == base(math) is not None and "apart" not in (*flash.flags, *math.flags)


def test_stop_on_keeps_the_records_of_the_whole_case(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("-m", *QUICK, "hydra.searchpath=[file://conf]", "backend=wrong,flash", "batch=1,2", "sweep=stopped")
    ran = run(*words, "stop_on=[inaccurate]", cwd=home)
    # Typed again it neither goes on behind that case nor ends as if all were well.
    again = typed(monkeypatch, home)(*words, "stop_on=[inaccurate]")
    for code, out, told in ((ran.returncode, ran.stdout, complaints(ran)), (*again[:2], again[2].splitlines())):
        assert (code, told) == (1, [])
        assert "stopped at the first inaccurate job (stop_on), wrong-" in out
    records = found(home, "stopped")
    assert sorted(names(records)) == [("flash", 1), ("wrong", 1)]
    assert (of(records, "wrong").status, of(records, "flash").status) == ("inaccurate", "ok")
