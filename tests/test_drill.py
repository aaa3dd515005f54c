"""The fault drill, small: what a few runs of a command can suffer. `make drill` runs the large one."""

import subprocess
import sys

import pytest
from cli import environment


# 40 s of processor; each of its commands starts a worker, a parent and MLflow anew.
@pytest.mark.timeout(900)
def test_nothing_is_lost_whatever_goes_wrong(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "drill", "24"],
        cwd=tmp_path,
        env=environment() | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "nothing was lost" in done.stdout
    assert list(tmp_path.iterdir()) == []
