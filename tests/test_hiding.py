"""Files of the current folder that have the names of modules."""

import subprocess
import sys
from pathlib import Path

import cli

NAMES = ("secrets", "types", "numpy", "random", "mlflow", "torch")


def test_a_file_of_the_current_folder_hides_no_module(tmp_path):
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('hidden')")
    (tmp_path / "mine.py").write_text("from attn_exp.backends.eager import Eager as Mine")
    words = ["-m", "backend._target_=mine.Mine", "~backend.name", *cli.QUICK, "tracker=mlflow", "sweep=a"]
    command = [Path(sys.executable).with_name("attn-exp"), *words]
    done = subprocess.run(command, cwd=tmp_path, env=cli.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [record.status for record in cli.records(tmp_path, "a").values()] == ["ok"]
