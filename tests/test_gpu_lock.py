"""The lock of a GPU lies where no other user can put or hold one."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from attn_exp.core.errors import UserError
from attn_exp.core.host.nvml import GpuInfo
from attn_exp.execution.gpus import lease, private_folder, try_lease

GPU = GpuInfo(0, "NVIDIA H200", "GPU-1")
IN_ITS_PLACE: dict[str, Callable[[Path], object]] = {
    "link": lambda path: path.symlink_to(path.parent / "target"),
    "pipe": os.mkfifo,
    "folder that others can write to": lambda path: (path.mkdir(), path.chmod(0o777)),
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
def test_a_file_of_another_user_in_its_place_is_named_and_not_followed(kind: str, temporary: Path) -> None:
    IN_ITS_PLACE[kind](temporary / f"attn_exp-{os.getuid()}")
    with pytest.raises(UserError, match=r"attn_exp-\d+ is not a folder that only you can write to: remove it, or set"):
        try_lease([GPU])
    assert list((temporary / "target").iterdir()) == []


HOLD = """
import sys, time
from filelock import FileLock
lock = FileLock(sys.argv[1])
lock.acquire()
print("held", flush=True)
time.sleep(600)
"""


def test_a_gpu_that_stays_held_is_given_up_with_a_sentence(temporary: Path) -> None:
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
        assert said[0] == "waiting for GPU 0 (NVIDIA H200), on which another attn_exp is measuring"
        assert "GPU 0 (NVIDIA H200) is held by another attn_exp for 0.1 s" in str(caught.value)
    finally:
        process.kill()
        process.wait()
    lease([GPU], said.append, 0.1).release()
    assert len(said) == 1
