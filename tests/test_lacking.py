"""Hosts that lack a system call: kernels before 5.3, strict containers, NFS without a lock daemon, FAT."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import cli
import pytest

from attn_exp.core.host import process

SOURCE = Path(__file__).parent / "drill" / "lacking.c"
ENDS = """
import os
from attn_exp.backends.eager import Eager

class Ends(Eager):
    def prepare(self, case, inputs):
        os._exit(3)
"""
HELD_TWICE = """
from pathlib import Path
from filelock import Timeout
from attn_exp.core.host.lacking import hold
first = hold(Path("lock"), 0.1)
try:
    hold(Path("lock"), 0.1)
except Timeout:
    print("held")
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    made = tmp_path_factory.mktemp("lacking") / "lacking.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", made, SOURCE, "-ldl"], check=True)
    return made


@pytest.mark.parametrize("lacking", ["pidfd_open flock_lock fsync link chmod", "pidfd_denied flock_none"])
def test_a_sweep_needs_none_of_them(library, lacking, tmp_path):
    (tmp_path / "ending.py").write_text(ENDS)
    variables = cli.environment() | {"LD_PRELOAD": str(library), "LACKING": lacking}
    variables["PYTHONPATH"] = os.pathsep.join([str(tmp_path), variables["PYTHONPATH"]])
    words = ["backend._target_=ending.Ends,attn_exp.backends.eager.Eager", "~backend.name", "seq_len=16",
             "passes=[forward]", "stopping=quick", "device=cpu", "sweep=a", "save_plots=false"]  # fmt: skip
    command = [sys.executable, "-m", "attn_exp", "-m", *words]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    records = [json.loads(path.read_text()) for path in (tmp_path / "multirun" / "a").glob("*/record.json")]
    assert sorted(one["status"] for one in records) == ["crashed", "ok"], done.stderr
    held = subprocess.run(
        [sys.executable, "-c", HELD_TWICE], cwd=tmp_path, env=variables, capture_output=True, text=True, check=True
    )
    assert held.stdout == "held\n"


def test_children_are_found_where_the_kernel_lists_none(monkeypatch):
    child = subprocess.Popen(["sleep", "60"])
    try:
        listed = process.descendants(os.getpid())
        monkeypatch.setattr(Path, "exists", lambda self: False)
        assert listed == process.descendants(os.getpid())
        assert child.pid in {pid for pid, _ in listed}
    finally:
        child.kill()
        child.wait()
