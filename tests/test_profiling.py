import sqlite3

import pytest
from cli import QUICK, TRACKED, left_behind, records, run
from inprocess import typed as in_process

import attn_exp.worker.__main__ as worker
from attn_exp.core.record.file import FILE_NAME, read_record
from attn_exp.results.store import done_record

# One job, nothing but its forward.
ONE = ("backend=eager", "sweep=a", *QUICK)


def profiles(folder, name="eager"):
    record = records(folder, "a")[name]
    assert record.status == "ok" and record.metrics["forward/time_us"] > 0
    return record.profiles


def test_profilers_that_work_raise_crash_and_hang_never_cost_the_timing_and_the_sweep_goes_on(tmp_path):
    # A worker each that dies, so that the sweep has to go on with another.
    done = run(
        *("-m", "backend=eager,cudnn,flash", "profiler=[works,raises,missing,segfaults,hangs]", "sweep=a", *TRACKED),
        "passes=[forward,backward]",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    for name in ("eager", "flash"):
        found = profiles(tmp_path, name)
        assert list(found) == ["works", "raises", "missing", "segfaults", "hangs"]
        assert {one: profile.status for one, profile in found.items()} == {
            "works": "ok",
            "raises": "failed",
            "missing": "unavailable",
            "segfaults": "failed",
            "hangs": "failed",
        }
        assert [kernel.direction for kernel in found["works"].kernels] == ["forward", "backward"]
        assert found["works"].files == ("profiles/works/notes.txt", "profiles/works/trace.bin")
        assert found["works"].seconds > 0
        assert found["raises"].reason == "RuntimeError: this profiler raises"
        assert found["raises"].files == ("profiles/raises/half.txt",)
        assert found["missing"].reason == "it is not installed: pip install it"
        assert "SIGSEGV while profiling" in (found["segfaults"].reason or "")
        assert "died in profiler=segfaults" in (found["hangs"].reason or "")
    unsupported = records(tmp_path, "a")["cudnn"]
    assert (unsupported.status, unsupported.profiles) == ("unsupported", {})
    assert left_behind(tmp_path) == []

    with sqlite3.connect(tmp_path / "mlruns" / "mlflow.db") as database:
        stored = dict(database.execute("select key, value from metrics where key like 'works/%'"))
        tags = dict(database.execute("select key, value from tags where key like 'attn_exp.profiler_%'"))
        (uri,) = database.execute("select artifact_uri from runs where name like 'eager%'").fetchone()
    assert stored == {"works/kernels": 2.0}
    assert tags["attn_exp.profiler_works"] == "ok"
    assert tags["attn_exp.profiler_missing"].startswith("unavailable: it is not")
    artifacts = tmp_path / uri.removeprefix("file://").removeprefix(str(tmp_path)).lstrip("/")
    assert (artifacts / "profiles" / "works" / "notes.txt").read_text() == "seen"
    assert "works ok" in (artifacts / "profiles" / "explain.txt").read_text()


def test_a_profiler_that_hangs_is_killed_after_its_own_time_and_the_timing_kept(tmp_path):
    done = run(*ONE, "profiler=hangs", "profiler_timeout_s=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    hung = profiles(tmp_path)["hangs"]
    assert (hung.status, hung.reason) == ("failed", "profiling took longer than 1 s and was killed")
    assert left_behind(tmp_path) == []


def test_a_job_is_done_once_it_has_every_profile_that_is_asked_for(tmp_path, monkeypatch):
    """In this process, so that it is known what ran."""
    monkeypatch.setattr("attn_exp.worker.__main__.limit_memory", lambda: None)
    typed = in_process(monkeypatch, tmp_path)
    flags = ("--config-dir", str(worker.Path(__file__).parent / "conf"))

    def once(*more):
        code, out, err = typed(*flags, *ONE, "isolation=none", *more)
        assert code == 0, err
        return read_record(next(tmp_path.glob(f"multirun/a/eager-*/{FILE_NAME}")).parent), out

    plain, _ = once()
    assert plain.profiles == {} and plain.request.profilers == ()
    profiled, _ = once("profiler=works", "profiler.works.megabytes=0.5", "profiler_limit_mb=0.1")
    assert profiled.request.job == plain.request.job, "a profiler is no part of a job's identity"
    assert profiled.finished_at > plain.finished_at
    works = profiled.profiles["works"]
    assert works.status == "ok" and works.kernels and works.files == ("profiles/works/notes.txt",)
    assert works.reason == "trace.bin of 0.5 MB was removed: it exceeds profiler_limit_mb=0.1"
    assert not list(tmp_path.rglob("trace.bin"))
    kept, out = once("profiler=works")
    assert kept.finished_at == profiled.finished_at and "are kept" in out
    assert once()[0].finished_at == profiled.finished_at, "with none asked for it is done too"
    both, _ = once("profiler=[raises,works]")
    assert list(both.profiles) == ["raises", "works"]
    assert once("profiler=[raises]")[0].finished_at == both.finished_at, "a profile that failed is there"
    folder = next(tmp_path.glob("multirun/a/eager-*"))
    assert done_record(both.request, folder) == both
    assert "done" in typed(*flags, *ONE, "profiler=works", "dry_run=true")[1]
    assert "would run" in typed(*flags, *ONE, "profiler=missing", "dry_run=true")[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["profiler=wroks"], ["profiler=wroks does not exist", "did you mean 'works'?"]),
        (["-m", "profiler=works,raises"], ["profiler=[works,raises]"]),
        (["profiler.works.megabytes=1"], ["choose profiler=works"]),
        (["profiler=works", "profiler.works.megabits=1"], ["there is no key 'profiler.works.megabits'"]),
        (["profiler=works", "profiler_timeout_s=0"], ["profiler_timeout_s=0 is not a positive number"]),
        (["profiler=null"], ["Hydra cannot compose these overrides ("]),
        (["+profiler.mine.name=x"], ["profiler.mine has no class"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_mistyped_word_is_one_sentence(arguments, words, tmp_path, monkeypatch):
    flags = ("--config-dir", str(worker.Path(__file__).parent / "conf"))
    code, _, err = in_process(monkeypatch, tmp_path)(*flags, *arguments, *ONE)
    assert code == 2, err
    assert len(err.strip().splitlines()) == 1
    for word in words:
        assert word in err
    assert not (tmp_path / "multirun").exists()
