"""A sweep's folder may be somebody else's: nothing is written out of it, and nothing in it stops a reader."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import sweeps

from attn_exp.commands.compare import main as compare_main
from attn_exp.commands.explain import main as explain_main
from attn_exp.commands.log import main as log_main
from attn_exp.core.files import SHORT_BYTES, owner_mark, read_whole, write_whole
from attn_exp.core.profile import Profile
from attn_exp.core.record_file import FILE_NAME
from attn_exp.explain.page import keep_pages
from attn_exp.plots.style import available
from attn_exp.results.read import read_folder, typed_command
from attn_exp.results.store import place_identity, sweep_identity
from attn_exp.results.table import write_tables
from attn_exp.run.closing import plots_and_curves, ranked_rivals, write_report


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a sweep of two jobs, in the folder in which one stands."""
    monkeypatch.chdir(tmp_path)
    return sweeps.write(tmp_path / "multirun" / "first", [sweeps.job(), sweeps.job("math")])


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """Return a folder that is not the sweep's, with a file that must stay as it is."""
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("very private")
    return tmp_path / "private"


def untouched(private: Path) -> bool:
    return [path.name for path in private.iterdir()] == ["key"] and (private / "key").read_text() == "very private"


def test_tables_replace_what_stands_in_their_place(folder: Path, private: Path) -> None:
    (folder / "table.txt").symlink_to(private / "key")
    os.mkfifo(folder / "table.csv")
    text, comma = write_tables(read_folder(folder).results, folder)
    assert not text.is_symlink()
    assert "flash" in text.read_text()
    assert "flash" in comma.read_text()
    assert untouched(private)


@pytest.mark.skipif(not available(), reason="matplotlib is not installed")
def test_plots_and_pages_are_not_written_through_a_link(folder: Path, private: Path) -> None:
    (folder / "plots").symlink_to(private)
    (folder / "report.html").symlink_to(private / "key")
    said: list[str] = []
    sweep = read_folder(folder)
    drawn, _ = plots_and_curves(sweep, ranked_rivals(sweep, said.append), said.append)
    assert drawn == []
    # A file is put in the place of a link.
    assert write_report(ranked_rivals(sweep, said.append), drawn, folder, said.append) == [folder / "report.html"]
    assert not (folder / "report.html").is_symlink()
    assert said and "it is a link, and nothing is written through one" in said[0]
    assert untouched(private)
    profiled = replace(sweeps.job(), profiles={"torch": Profile(status="ok")})
    (other,) = (path for path in sweeps.write(folder.parent / "second", [profiled]).iterdir() if path.is_dir())
    (other / "profiles").symlink_to(private)
    assert keep_pages(read_folder(folder.parent / "second").results, pictures=True) == []
    assert untouched(private)


def test_a_planted_temporary_name_is_not_written_through(
    folder: Path, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attn_exp.core.files.secrets.token_hex", lambda _: "guessed")
    (folder / f".table.txt{owner_mark()}guessed").symlink_to(private / "key")
    with pytest.raises(FileExistsError):
        write_whole(folder / "table.txt", b"x")
    assert untouched(private)


ODD: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": lambda path: path.mkdir(),
    "loop": lambda path: path.symlink_to(path.name),
    "socket": lambda path: os.mknod(path, 0o140644),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.timeout(60)
def test_an_odd_thing_in_a_file_s_place_is_skipped_with_its_reason(
    kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = folder / sweeps.job("math").request.job / FILE_NAME
    record.unlink()
    ODD[kind](record)
    with pytest.raises(OSError):
        read_whole(record)
    for command, code in ((compare_main, (0, 3)), (explain_main, (0, 3)), (log_main, (3,))):
        words = ["first", "tracker.uri=sqlite:///m.db"] if command is log_main else ["first"]
        assert command(words) in code
        out, err = capsys.readouterr()
        assert f"{record.relative_to(Path.cwd())} cannot be read" in (out + err).replace(f"{Path.cwd()}/", "")
        assert "Traceback" not in out + err


@pytest.mark.timeout(60)
def test_odd_things_beside_the_records_stop_nobody(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "loop").symlink_to("loop")
    (folder / "round").symlink_to(".")
    os.mkfifo(folder / "sweep.id")
    os.mkfifo(folder / "command.txt")
    os.mkfifo(folder / ".mlflow.lock")
    assert len(sweep_identity(folder)) == 32
    for command in (compare_main, explain_main):
        assert command(["first"]) in (0, 3)
    assert log_main(["first", "tracker.uri=sqlite:///m.db"]) in (0, 3)
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    assert "2 records, 2 new" in out
    for name in ("sweep.id", "command.txt"):
        # Of an endless file nothing is read, although its words would do.
        (folder / name).unlink()
        (folder / name).write_text("0" * 32 + " " * SHORT_BYTES)
    assert sweep_identity(folder) == place_identity(folder)
    assert typed_command(folder) == ""
