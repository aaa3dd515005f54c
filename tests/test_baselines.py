"""Baselines: kept under a name by `save=`, compared with by `against=`, whole or not at all."""

import os
import shutil

import pytest
import sweeps

import attn_exp
from attn_exp.commands.compare import main
from attn_exp.results import baselines


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with sweeps in multirun/, in which commands are typed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTN_EXP_STATE", str(tmp_path / "state"))
    for name, us in (("old", 100.0), ("slow", 112.0), ("same", 100.1)):
        place = sweeps.write(tmp_path / "multirun" / name, [sweeps.job("flash", us), sweeps.job("math", 300.0)])
        (place / "command.txt").write_text(f"attn-exp run sweep={name}\n")
    return tmp_path


def kept(home):
    return {str(one.relative_to(home)): one.read_bytes() for one in (home / "baselines/main").glob("*/record.json")}


def test_a_baseline_outlives_its_sweep_and_is_compared_with_by_its_name(home, capsys):
    assert main(["old", "save=main"]) == 0
    said = "baselines/main keeps 2 records of old: attn-exp compare SWEEP against=main compares with it"
    assert said in capsys.readouterr().err
    records = [path.read_bytes() for path in (home / "multirun/old").glob("*/record.json")]
    assert sorted(kept(home).values()) == sorted(records)
    shutil.rmtree(home / "multirun/old")
    assert main(["slow", "against=main", "fail_if_slower=3%"]) == 1
    assert "1 slower" in capsys.readouterr().out
    assert main(["same", "against=main", "fail_if_slower=3%"]) == 0
    assert attn_exp.compare("slow", "main").counts["slower"] == 1
    assert main(["main"]) == 0
    assert "made by" not in capsys.readouterr().err


def test_it_has_the_last_ten_runs_and_begins_anew_if_asked(home, capsys):
    for minute in range(1, 13):
        record = sweeps.job("flash", 100.0 + minute, finished_at=sweeps.NOON + minute)
        sweeps.write(home / f"multirun/run{minute}", [record])
        for _ in range(2):
            assert main([f"run{minute}", "save=main"]) == 0
    capsys.readouterr()
    # 103 to 112 us are its runs.
    for found in (attn_exp.compare("slow", "main"), attn_exp.compare("slow", attn_exp.load("main"))):
        assert any(note.startswith("10 old runs of ") for note in found.notes)
        row = next(row for row in found.rows if row.cell.direction == "forward" and row.old)
        assert (row.verdict, row.old.value) == ("undecided", pytest.approx(107.46, abs=0.01))
    assert main(["slow", "against=main", "fail_if_slower=3%"]) == 0
    assert main(["old", "save=main", "replace=true"]) == 0
    assert main(["slow", "against=main", "fail_if_slower=3%"]) == 1
    assert os.listdir("baselines") == ["main"]


def test_a_failure_leaves_the_earlier_one(home, capsys, monkeypatch):
    assert main(["old", "save=main"]) == 0
    before, write, written = kept(home), baselines.write_whole, []

    def full(path, content):
        written.append(path)
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        write(path, content)

    monkeypatch.setattr(baselines, "write_whole", full)
    assert main(["slow", "save=main", "replace=true"]) == 2
    assert "cannot write the baseline baselines/main (No space left on device)" in capsys.readouterr().err
    assert kept(home) == before and os.listdir("baselines") == ["main"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slow", "against=mian"], "there is no sweep or baseline 'mian': did you mean 'main'? the sweeps in multirun"),
        (["slow", "against=mian"], "; the baselines are both, main; a folder's path works too"),
        (["old", "save=../x"], "save=../x cannot name a folder"),
        (["old", "save=slow"], "save=slow is the name of a sweep in multirun: choose another"),
        (["old,slow", "save=more"], "save=more keeps one sweep, and 2 were given: name one"),
        (["old", "against=slow", "save=more"], "save= keeps one sweep of a folder as a baseline"),
        (["old", "uri=sqlite:///x.db", "save=more"], "save= keeps one sweep of a folder as a baseline"),
        (["old", "replace=true"], "replace=true begins a baseline anew: say which with save=NAME"),
        (["broken", "save=more"], "broken is no baseline, multirun/broken/x/record.json"),
        (["slow", "against=both"], "'both' is a sweep and a baseline: write multirun/both or baselines/both"),
    ],
)
def test_a_mistake_is_one_sentence_and_keeps_nothing(home, capsys, words, message):
    sweeps.write(home / "multirun/broken", [sweeps.job()])
    (home / "multirun/broken/x").mkdir()
    (home / "multirun/broken/x/record.json").write_text("{")
    for name in ("main", "both"):
        attn_exp.load("old").save(name)
    shutil.copytree(home / "multirun/old", home / "multirun/both")
    assert main(words) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert sorted(one for one in os.listdir("baselines") if one[0] != ".") == ["both", "main"]


def test_python_keeps_baselines(home):
    place = attn_exp.load("old").save("main")
    assert place.is_dir()
    attn_exp.load("slow").save("main", replace=True)
