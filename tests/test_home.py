"""A user without a home directory, or beside files with names of modules, measures, stores and draws like any other."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import cli
import pytest

from attn_exp.core.host.home import provide_home


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder for temporary files of a user without a home."""

    def no_home() -> Path:
        if "HOME" in os.environ:
            return Path(os.environ["HOME"])
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("HOME", "")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr("attn_exp.core.host.home.tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_without_a_home_there_is_a_private_one_that_stays(nowhere: Path) -> None:
    provide_home()
    home = Path(os.environ["HOME"])
    assert home.parent == nowhere and stat.S_IMODE(home.stat().st_mode) == 0o700
    del os.environ["HOME"]
    provide_home()
    assert Path(os.environ["HOME"]) == home


def test_somebody_else_s_folder_is_no_home(nowhere: Path) -> None:
    (nowhere / "theirs").mkdir()
    (nowhere / f"attn_exp-home-{os.getuid()}").symlink_to(nowhere / "theirs")
    provide_home()
    assert Path(os.environ["HOME"]).is_dir()
    assert Path(os.environ["HOME"]).name not in ("theirs", f"attn_exp-home-{os.getuid()}")


# Modules that files of the current folder have the names of.
NAMES = ("secrets", "types", "numpy", "random", "mlflow", "torch")


def test_a_sweep_without_a_home_and_beside_files_with_names_of_modules_is_stored_and_drawn(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('hidden')")
    (tmp_path / "mine.py").write_text("from attn_exp.backends.eager import Eager as Mine")
    usual = cli.environment()
    path = os.pathsep.join([str(cli.TESTS / "no_home"), usual["PYTHONPATH"]])
    named = ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME")
    variables = {name: value for name, value in usual.items() if name not in named} | {"PYTHONPATH": path}
    words = ("-m", *cli.TRACKED, "backend._target_=mine.Mine", "~backend.name", "batch=1,2", "save_plots=true")
    command = [Path(sys.executable).with_name("attn-exp"), *words, "sweep=a"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, cli.complaints(done)) == (0, []), done.stderr
    assert "home" not in done.stdout
    assert [record.status for record in cli.records(tmp_path, "a").values()] == ["ok", "ok"]
    assert {status for _, status, _ in cli.runs(tmp_path)} == {"FINISHED"}
    assert list((tmp_path / "multirun" / "a").rglob("*.png"))
