"""Containers that share a host name and a folder: each has process numbers of its own (a real namespace of them)."""

import contextlib
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import cli
import pytest

from attn_exp.core.files import hidden_files, remove_litter, temporary_folder
from attn_exp.core.process import kill_orphans

_UNSHARE = ("unshare", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")
_NAME = "ATTN_EXP_TEST_MARK"
# Number 1 of its namespace, as a container's first process is; number 2 of it is a child.
HOLD = """
import os, subprocess, sys
from pathlib import Path
from attn_exp.core import files
from attn_exp.core.process import own_mark

def wait(_):
    print("holding", flush=True)
    sys.stdin.read()

assert os.getpid() == 1
left = subprocess.Popen(["sleep", "600"], env={sys.argv[2]: own_mark()}, stdout=subprocess.DEVNULL)
files.os.fsync = wait
with files.temporary_folder() as folder:
    (folder / "upload").touch()
    files.write_whole(Path(sys.argv[1], "record.json"), b"whole")
left.kill()
"""
CLEAN = """
import os, sys
from pathlib import Path
from attn_exp.core.files import hidden_files, remove_litter
from attn_exp.core.process import kill_orphans
assert os.getpid() == 1
remove_litter([*hidden_files(Path(sys.argv[1])), *Path(sys.argv[1]).glob("attn_exp_*")])
kill_orphans(sys.argv[2])
"""


def _can_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*_UNSHARE, "true"], capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not _can_unshare(), reason="this system lets nobody make a namespace of processes")


def _contained(code: str, folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*_UNSHARE, sys.executable, "-c", textwrap.dedent(code), str(folder), _NAME],
        env=cli.environment() | {"TMPDIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def _holder(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """A container in the middle of writing a record, with a folder for uploads and a worker."""
    process = _contained(HOLD, folder)
    assert process.stdout is not None
    assert process.stdout.readline() == "holding\n"
    try:
        yield process
    finally:
        # Its input ends only when it is killed, or it would go on.
        process.kill()
        process.wait()
        process.communicate()


def _clean_here(folder: Path) -> None:
    remove_litter([*hidden_files(folder), *folder.glob("attn_exp_*")])
    kill_orphans(_NAME)


def _clean_in_another(folder: Path) -> None:
    cleaner = _contained(CLEAN, folder)
    cleaner.communicate()
    assert cleaner.returncode == 0


def _used(folder: Path) -> list[str]:
    return sorted(path.name.partition("@")[0] for path in folder.iterdir())


@pytest.mark.parametrize("clean", [_clean_here, _clean_in_another])
def test_what_a_container_uses_stays_until_it_has_ended(clean: Callable[[Path], None], tmp_path: Path) -> None:
    with _holder(tmp_path) as holder:
        clean(tmp_path)
        assert _used(tmp_path) == [".record.json", "attn_exp_"]
        # Its worker lives, too: the whole of it goes on.
        out, _ = holder.communicate("")
        assert (holder.returncode, out) == (0, "")
    assert _used(tmp_path) == ["record.json"]


@pytest.mark.parametrize("clean", [_clean_here, _clean_in_another])
def test_what_a_killed_container_left_is_removed(clean: Callable[[Path], None], tmp_path: Path) -> None:
    with _holder(tmp_path):
        pass
    assert _used(tmp_path) == [".record.json", "attn_exp_"]

    def cleaned() -> bool:
        clean(tmp_path)
        return _used(tmp_path) == []

    # Who is killed holds its locks a moment longer.
    cli.wait_for(cleaned, 30.0)


def test_what_this_process_uses_is_no_litter_in_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_exp.core.files.tempfile.tempdir", str(tmp_path))
    with temporary_folder() as folder:
        _clean_in_another(tmp_path)
        assert folder.is_dir()
