"""The lock of a GPU lies where no other user can put or hold one."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from attn_exp.core.errors import UserError
from attn_exp.core.nvml import GpuInfo
from attn_exp.run.gpus import private_folder, try_lease

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


def test_a_folder_of_another_user_is_not_taken(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private_folder()
    mine = os.getuid()
    (temporary / f"attn_exp-{mine + 1}").mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with pytest.raises(UserError, match="only you can write to"):
        private_folder()
