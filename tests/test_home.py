"""A user without a home directory measures, stores and looks at plots like any other."""

import os
import stat
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


def test_a_sweep_of_a_user_without_an_entry_is_stored_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = cli.environment()
    path = os.pathsep.join([str(cli.TESTS / "no_home"), usual["PYTHONPATH"]])
    named = ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME")
    variables = {name: value for name, value in usual.items() if name not in named} | {"PYTHONPATH": path}
    monkeypatch.setattr(cli, "environment", lambda: variables)
    done = cli.run("-m", *cli.TRACKED, "backend=math,flash", "sweep=a", "save_plots=true", cwd=tmp_path)
    assert (done.returncode, cli.complaints(done)) == (0, [])
    assert "home" not in done.stdout
    assert {status for _, status, _ in cli.runs(tmp_path)} == {"FINISHED"}
    assert list((tmp_path / "multirun" / "a").rglob("*.png"))
