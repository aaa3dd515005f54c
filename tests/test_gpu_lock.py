"""The lock of a GPU lies where no other user can put or hold one."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from attn_exp.core.errors import UserError
from attn_exp.core.nvml import GpuInfo
from attn_exp.run.gpus import holder, lease, private_folder, try_lease

GPU = GpuInfo(0, "NVIDIA H200", "GPU-1")
IN_ITS_PLACE: dict[str, Callable[[Path], object]] = {
    "link": lambda path: path.symlink_to(path.parent / "target"),
    "file": lambda path: path.touch(),
    "pipe": os.mkfifo,
    "folder that others can write to": lambda path: (path.mkdir(), path.chmod(0o777)),
    "loop": lambda path: path.symlink_to(path.name),
}


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "target").mkdir()
    return tmp_path


def test_a_gpu_is_leased_once_in_a_folder_of_one_s_own(temporary: Path) -> None:
    held = try_lease([GPU])
    assert held is not None
    assert try_lease([GPU]) is None
    held.release()
    again = try_lease([GPU])
    assert again is not None
    again.release()
    assert private_folder().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", IN_ITS_PLACE)
@pytest.mark.timeout(60)
def test_what_another_user_put_in_its_place_is_named_and_not_followed(kind: str, temporary: Path) -> None:
    IN_ITS_PLACE[kind](temporary / f"attn_exp-{os.getuid()}")
    with pytest.raises(UserError, match=r"attn_exp-\d+ is not a folder that only you can write to: remove it, or set"):
        try_lease([GPU])
    assert list((temporary / "target").iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "loop", "folder that others can write to"])
def test_what_is_in_the_place_of_the_lock_itself_is_named_and_not_followed(kind: str, temporary: Path) -> None:
    IN_ITS_PLACE[kind](private_folder() / "GPU-1.lock")
    with pytest.raises(UserError, match=r"GPU-1\.lock cannot be locked \(.+\): remove it, or set TMPDIR=FOLDER"):
        try_lease([GPU])
    assert list((temporary / "target").iterdir()) == []


def test_a_folder_of_another_user_is_not_taken(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private_folder()
    mine = os.getuid()
    (temporary / f"attn_exp-{mine + 1}").mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with pytest.raises(UserError, match="only you can write to"):
        private_folder()


HOLD = """
import sys, time
from filelock import FileLock
lock = FileLock(sys.argv[1])
lock.acquire()
print("held", flush=True)
time.sleep(600)
"""


def test_a_gpu_that_stays_held_is_given_up_with_a_sentence_that_names_the_holder(temporary: Path) -> None:
    path = private_folder() / f"{GPU.uuid}.lock"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), "x" * 300, "token=hf_" + "a1" * 20], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        said: list[str] = []
        with pytest.raises(
            UserError, match=r"end that, choose another with device=cuda:N or CUDA_VISIBLE_DEVICES, or set gpu_wait_s="
        ) as caught:
            lease([GPU], said.append, 0.1)
        assert said[0].startswith(f"waiting for GPU 0 (NVIDIA H200), on which process {process.pid} (")
        assert f"GPU 0 (NVIDIA H200) is held by process {process.pid} (" in str(caught.value)
        assert len(said[0]) < 300 and "a1a1" not in holder(path) and "\n" not in holder(path)
        assert "stopped" not in holder(path)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert f"stopped (kill -CONT {process.pid} continues it)" in holder(path)
    finally:
        process.kill()
        process.wait()
    assert holder(path) == "another attn_exp"
    lease([GPU], said.append, 0.1).release()
    assert len(said) == 1
