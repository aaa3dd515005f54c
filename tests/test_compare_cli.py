"""The command and the notebook's functions: exit codes, mistakes, files, and what a terminal shows."""

import importlib.util
import json
import os
import pty
import subprocess
import sys

import cli
import pytest
import sweeps

import attn_exp
from attn_exp.commands.compare import COMMAND, main
from attn_exp.core.errors import UserError


@pytest.fixture(autouse=True)
def _state(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_EXP_STATE", str(tmp_path / "state"))


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with sweeps in multirun/, in which commands are typed."""
    monkeypatch.chdir(tmp_path)
    jobs = {
        "old": [sweeps.job("flash", 100.0), sweeps.job("cudnn", 80.0)],
        "new": [sweeps.job("flash", 104.5), sweeps.failed("error", "cudnn")],
        "same": [sweeps.job("flash", 100.2), sweeps.job("cudnn", 80.1)],
    }
    for name, records in jobs.items():
        sweeps.write(tmp_path / "multirun" / name, records)
    return tmp_path


def test_help_answers_at_once(home, capsys):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    for name in COMMAND.named:
        assert f"  {name}=" in said, name
    assert max(map(len, said.splitlines())) <= 100
    assert main([]) == 2


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["new", "against=old"], 0),
        (["new", "against=last"], 0),
        (["new", "against=old", "fail_if_slower=3%"], 1),
        (["new", "against=old", "fail_if_slower=3%", "where=backend == flash"], 1),
        (["new", "against=old", "fail_if_slower=5%", "where=backend == flash"], 0),
        (["new", "against=old", "fail_if_slower=0.05"], 1),  # one is lost
        # 4.5 % more, give or take: not surely slower by 5 %.
        (["new", "against=old", "fail_if_slower=5%", "where=backend == flash", "undecided=fail"], 1),
        (["new", "against=old", "fail_if_slower=5%", "where=backend == flash", "undecided=pass"], 0),
        (["same", "against=old", "fail_if_slower=3%"], 0),
        (["old,new,same", "history=true"], 0),
        (["multirun/old", "format=csv"], 0),
    ],
)
def test_exit_codes(home, capsys, words, code):
    assert main(words) == code
    said = capsys.readouterr()
    assert said.out
    assert bool(said.err) == (code == 1 or ("fail_if_slower=5%" in words and "undecided=pass" not in words))


def test_a_corrupt_file_is_named_and_the_exit_code_says_so(home, capsys):
    job = next((home / "multirun/same").glob("flash*")) / "record.json"
    job.write_bytes(job.read_bytes()[:100])
    assert main(["same", "against=old"]) == 3
    said = capsys.readouterr()
    assert said.err.startswith("skipped: multirun/same/flash-") and said.err.count("\n") == 1
    assert "gone" in said.out
    # A regression is the worse news.
    assert main(["same,new", "against=old", "fail_if_slower=3%"]) == 1
    for path in (home / "multirun/same").glob("*/record.json"):
        path.write_text('{"schema": 0}')
    capsys.readouterr()
    assert main(["same"]) == 2
    assert "has schema 0, this version reads 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nwe"], "there is no sweep 'nwe': did you mean 'new'"),
        (["against=old"], "no SWEEP was given: write one, for example attn-exp compare first; the newest are "),
        (["new", "--fail-if-slower"], "fail_if_slower= needs a value: write fail_if_slower=VALUE"),
        (["new", "aginst=old"], "there is no option 'aginst=': did you mean 'against'?"),
        (["new", "against=new"], "new is on both sides of against=: compare it with another sweep"),
        (["new", "old", "-x"], "there is no option '-x'"),
        (["new,,old"], "has an empty name between its commas"),
        (["new", "fail_if_slower=3%"], "say which with against=NAME"),
        (["new", "against=old", "margin=300%"], "margin=300% is no percentage"),
        (["new", "against=old", "history=true"], "against and history are different comparisons"),
        (["new", "against=old", "baseline=flash"], "baseline= has no effect with against"),
        (["new", "history=true"], "history=true needs 3 sweeps or more"),
        (["new", "format=jsn"], "format=jsn is not known: did you mean 'json'"),
        (["new", "rows=many"], "rows=many is no number of rows"),
        (["new", "anyway=yes"], "anyway=yes is neither true nor false"),
        (["new", "where="], "where= is empty"),
        (["new", "metric=tflops", "metric=time_us"], "metric is given twice"),
        (["new", "by=dtyp"], "by= names an unknown field 'dtyp': did you mean 'dtype'"),
        # Nothing is measured before that is spelled out.
        (["new", "settle"], "'settle' has no value: write settle=true"),
        (["new", "where=causal and"], "is not a valid filter"),
        (["new", "uri=sqlite:///nowhere.db"], "there is no database"),
        (["new", "out=nowhere/out.md"], "cannot write nowhere/out.md"),
        (["new", "out=report.pdf"], "has none of the endings .txt, .md, .csv, .json, .html: add format="),
        (["."], "has no records"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_with_2(home, capsys, words, said):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.startswith("attn-exp compare: ")
    assert (captured.out, captured.err.count("\n")) == ("", 1)


def test_last_is_the_last_sweep_that_shares_a_case(home, capsys):
    sweeps.write(home / "multirun/other", [sweeps.job("flash", of=sweeps.case(batch=64))])
    for minute, name in enumerate(("old", "same", "other", "new")):
        os.utime(home / "multirun" / name, (60 * minute, 60 * minute))
    assert main(["new", "against=last", "format=json"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)["sweeps"]] == ["same", "new"]
    assert main(["other", "against=last"]) == 2
    assert "against=last: no earlier sweep in multirun shares a case and backend: name one" in capsys.readouterr().err


def test_several_sweeps_are_said_to_be_pooled(home, capsys):
    assert main(["old", "same", "new", f"folder={home / 'multirun'}"]) == 0
    said = capsys.readouterr().out
    assert "6 records of 3 sweeps are pooled; against=SWEEP compares one with another\n" in said
    assert main(["old"]) == 0
    assert "pooled" not in capsys.readouterr().out


def test_files_are_written_in_the_format_of_their_name(home, capsys):
    for name, begin in {"a.md": "cudnn is ", "a.csv": "model,", "a.json": "{", "a.txt": "cudnn is"}.items():
        assert main(["old", f"out={name}"]) == 0
        assert (home / name).read_text().startswith(begin)
    assert main(["old", "out=b.txt", "format=json"]) == 0
    assert json.loads((home / "b.txt").read_text())["kind"] == "rivals"
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.splitlines()[0] == "a.md is written"


def printed_to_a_terminal(folder, **environment):
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "attn_exp", "compare", "new", "against=old"]
    plain = {name: value for name, value in cli.environment().items() if name != "NO_COLOR"}
    process = subprocess.Popen(command, cwd=folder, env=plain | environment, stdout=terminal)
    os.close(terminal)
    text = b""
    while True:
        try:
            part = os.read(controller, 65536)
        except OSError:
            break
        if not part:
            break
        text += part
    assert process.wait(240) == 0
    os.close(controller)
    return text.decode()


def test_colour_is_for_terminals_that_want_it(home):
    assert "\x1b[31mlost" in printed_to_a_terminal(home)
    assert "\x1b" not in printed_to_a_terminal(home, NO_COLOR="1")
    piped = cli.run("compare", "new", "against=old", cwd=home)
    assert piped.returncode == 0 and "\x1b" not in piped.stdout


def test_a_reader_that_leaves_early_is_no_error(home):
    command = f"{sys.executable} -m attn_exp compare old | head -1; exit ${{PIPESTATUS[1]}}"
    ran = subprocess.run(["bash", "-c", command], cwd=home, env=cli.environment(), capture_output=True, text=True,
                         check=False)  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, "")


def test_for_notebooks_the_package_loads_and_compares(home):
    assert attn_exp.compare("new", "old").counts == {"lost": 2, "slower": 1, "equivalent": 1}
    from attn_exp import compare, load

    old = load("old")
    assert compare(old, baseline="flash").baseline == "flash"
    assert compare("same", old).counts == {"equivalent": 4}
    assert {result.label for result in old.results} == {"flash", "cudnn"}
    with pytest.raises(AttributeError, match="no attribute 'compere'"):
        _ = attn_exp.compere
    with pytest.raises(UserError, match="names 3 sweeps: load one at a time"):
        load("*")
    with pytest.raises(UserError, match="there is no key 'format'"):
        compare("old", format="csv")


@pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="needs pandas")
def test_a_sweep_is_a_frame(home):
    frame = attn_exp.load("new").to_frame()
    assert len(frame) == 4
    assert frame.query("backend == 'flash' and `pass` == 'forward'")["time_us"].tolist() == [104.5]
    assert frame.query("status == 'error'")["time_us"].isna().all()
    assert {"batch", "q_len", "dtype", "causal", "tflops", "kernel", "flags"} <= set(frame.columns)
