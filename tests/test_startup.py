"""bench/startup.py: that it times what runs, and says what does not."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_a_command_is_timed_and_one_that_is_not_there_is_named(tmp_path):
    # A checkout without the package: its command ends by exit code 1.
    out, empty = tmp_path / "out.json", tmp_path / "empty"
    (empty / "attn_exp").mkdir(parents=True)
    (empty / "attn_exp" / "__init__.py").touch()
    command = [sys.executable, str(ROOT / "bench" / "startup.py"), str(ROOT), str(empty)]
    done = subprocess.run(
        [*command, "--runs", "2", "--only=--version", "--out", str(out)], capture_output=True, text=True, check=True
    )
    here, nowhere = json.loads(out.read_text())["commands"]
    assert here["command"] == "python -m attn_exp --version"
    assert here["exit_code"] == 0 and here["modules"] > 50
    assert len(here["wall_s"]) == len(here["cpu_s"]) == 2 and min(here["wall_s"] + here["cpu_s"]) > 0
    assert (nowhere["exit_code"], nowhere["wall_s"]) == (1, [])
    assert "exit code 1" in done.stdout
