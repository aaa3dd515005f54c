"""A sweep's folder may be somebody else's: nothing is written out of it, and nothing in it stops a reader."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import sweeps

from attn_exp.commands.compare import main as compare_main
from attn_exp.commands.explain import main as explain_main
from attn_exp.commands.log import main as log_main
from attn_exp.core.files import SHORT_BYTES, read_whole
from attn_exp.core.record.file import FILE_NAME
from attn_exp.results.read import read_folder, typed_command
from attn_exp.results.store import place_identity, sweep_identity
from attn_exp.results.table import write_tables


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


ODD: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("kind", ODD)
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
